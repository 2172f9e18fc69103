"""Runs a job: `python -m pipeline.run [conf=RECIPE] [key=value ...]`.

Knows: hydra, where the recipes are, and how a run begins and ends for the shell (messages, exit code).
Everything else starts at `pipeline.job.run_job`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from pipeline import schema_store
from pipeline.config import JobConfig
from pipeline.failures import PastHydra, check_keys, explain, wants_tracebacks
from pipeline.masking import mask
from pipeline.report.start_up import StartUp

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
            sys.exit(outcome.exit_code)
    except Exception as error:
        raise PastHydra from error


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
