"""Tells a script which jobs a command line stands for: `python -m pipeline.sweep [--multirun] key=value ...`

For each job, in bytes that no shell has to parse: its output directory, absolute, then the arguments of a run
of it alone, each ended by a NUL byte, and one more NUL. Checks every job's keys and runs none. Imports hydra
and none of the engine's, so that it answers where nothing else is installed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from pipeline.config import JobConfig
from pipeline.failures import PastHydra, check_keys
from pipeline.run import command_line
from pipeline.store import absolute


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    overrides = get_args_parser().parse_args(words).overrides
    flags = [word for word in words if word not in overrides]
    everywhere = [word for word in flags if word not in ("-m", "--multirun")]
    everywhere += [word for word in overrides if word.lstrip("+~").startswith("hydra")]
    records: list[bytes] = []

    def note(config: DictConfig) -> None:
        try:
            records.append(_record(config, everywhere))
        except Exception as error:
            raise PastHydra from error

    # Hydra makes directories and writes a sweep down, whatever the task is: those of the jobs stay unmade.
    with tempfile.TemporaryDirectory() as aside:
        own = [f"hydra.run.dir='{aside}'", f"hydra.sweep.dir='{aside}'", "hydra.sweep.subdir=."]
        # Hydra takes no flags between overrides.
        sys.argv[1:] = [*flags, *overrides, *own, "hydra.job_logging.root.handlers=[console]"]
        with contextlib.redirect_stdout(sys.stderr):
            command_line(note)
    if not records:
        print(f"tokenmill: {' '.join(flags)} runs no job: leave it out", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(b"".join(records))
    sys.stdout.buffer.flush()
    return 0


def _record(config: DictConfig, everywhere: Sequence[str]) -> bytes:
    check_keys(config)
    job = OmegaConf.to_object(config)
    assert isinstance(job, JobConfig)
    overrides = [str(override) for override in HydraConfig.get().overrides.task]
    words = [absolute(job.output.dir), *everywhere, *overrides]
    return b"".join(os.fsencode(word) + b"\0" for word in words) + b"\0"


if __name__ == "__main__":
    sys.exit(main())
