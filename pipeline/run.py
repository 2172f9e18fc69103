"""Runs a job: `python -m pipeline.run [conf=RECIPE] [key=value ...]`.

Knows: hydra, where the recipes are, and how a run begins and ends for the shell (messages, exit code).
Everything else starts at `pipeline.job.run_job`.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from pipeline import schema_store
from pipeline.config import JobConfig, LauncherKind
from pipeline.failures import PastHydra, check_keys, explain, wants_tracebacks
from pipeline.masking import mask
from pipeline.report.start_up import StartUp

if TYPE_CHECKING:
    from pipeline.report.outcome import Outcome

schema_store.register()


def conf_dir() -> Path:
    """The folder of recipes: beside the package in a checkout, inside it once installed."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf/config.yaml in {package} or beside it: install tokenmill again")


def main() -> None:
    command_line(_task)


def command_line(task: Callable[[DictConfig], None]) -> None:
    """The whole command line, from sys.argv to the exit code. task raises PastHydra from what goes wrong."""
    arguments = get_args_parser().parse_args()
    show_only = arguments.cfg or arguments.info is not None or arguments.help or arguments.hydra_help
    tracebacks = wants_tracebacks()
    # Hydra prints errors its own way, passwords included; with this it raises them for `explain`.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    command = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(task)
    try:
        with _masked_output() if show_only else contextlib.nullcontext():
            command()
    except PastHydra as stop:
        assert stop.__cause__ is not None
        sys.exit(explain(stop.__cause__, tracebacks))
    except OSError as error:
        sys.exit(explain(_of_output_dir(error), tracebacks))
    except (Exception, KeyboardInterrupt) as error:
        sys.exit(explain(error, tracebacks))


def _of_output_dir(error: OSError) -> Exception:
    """Ours come as PastHydra; on its own hydra touches only the run's directory, which is output.dir."""
    if error.filename is None:
        return error
    return ValueError(
        f"output.dir={error.filename} cannot be made: {error.strerror}; "
        "choose a directory that can be written"
    )


def _task(config: DictConfig) -> None:
    try:
        check_keys(config)
        job = OmegaConf.to_object(config)
        assert isinstance(job, JobConfig)
        _keep_record(config)
        if job.launcher.kind is LauncherKind.local:
            from pipeline.launcher import launch

            code = launch(job, Path(HydraConfig.get().runtime.output_dir))
            if code:
                sys.exit(code)
            return
        # Imported here: --help, tab completion and a mistyped key need none of the engine's imports.
        if job.bench.workload is not None:
            from pipeline.bench.benchmark import run_benchmark

            run_benchmark(job)
            return
        start_up = StartUp()
        from pipeline.job import run_job

        start_up.finished("imports")
        outcome = run_job(job, schema_store.worker_name(), start_up)
        if outcome.exit_code:
            # By now all is saved and every unit given back: Slurm ends a task that asks for another life.
            sys.exit(_leave(job, outcome))
    except Exception as error:
        raise PastHydra from error


def _leave(job: JobConfig, outcome: Outcome) -> int:
    """The exit code of a job that is not done."""
    from pipeline.cluster.requeue import Stop, leave
    from pipeline.output.ledger import Ledger
    from pipeline.output.progress import JobDirectory
    from pipeline.store import open_store

    def is_complete() -> bool:
        store = open_store(job.output.dir, job.output.storage_options, job.output.stage_dir)
        directory = JobDirectory.load(job.output.dir, store)
        return Ledger.read(directory.path, store).num_results == directory.num_results

    received = outcome.stopped_by if isinstance(outcome.stopped_by, signal.Signals) else None
    stop = Stop(received, outcome.out_of_time)
    return leave(outcome.exit_code, stop, is_complete, job.cluster, os.environ)


def _keep_record(config: DictConfig) -> None:
    """Writes this worker's configuration and overrides beside the output, storage options masked."""
    run = HydraConfig.get()
    folder = Path(run.runtime.output_dir) / "hydra" / schema_store.worker_name()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(mask(OmegaConf.to_yaml(config)), encoding="utf-8")
    # Not read one by one: that would put a password in place of its ${oc.env:...}.
    (folder / "overrides.yaml").write_text(mask(OmegaConf.to_yaml(run.overrides.task)), encoding="utf-8")


@contextlib.contextmanager
def _masked_output() -> Iterator[None]:
    buffer = io.StringIO()
    try:
        with contextlib.redirect_stdout(buffer):
            yield
    finally:
        sys.stdout.write(mask(buffer.getvalue()))


if __name__ == "__main__":
    main()
