"""Another life for a SLURM task that was told to stop before its job was done.

Slurm itself brings back a task that was preempted or whose node was lost, if submitted with --requeue; one
that reached its time limit it does not. Knows scontrol and what Slurm tells a task about itself; refuses to
know what was saved: by the time it is called, all of it is, because Slurm kills whoever asks.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipeline.cluster.processes import SlurmTask
from pipeline.config import ClusterConfig, Requeue

# Asks the script around this process to requeue: jobs/launch.sh knows the number. ERESTART of Linux.
EXIT_REQUEUE = 85
# How far the clocks of a node and of Slurm's controller may be apart.
_CLOCK_SKEW_S = 10.0
_SCONTROL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Stop:
    """Why a worker left: a signal, or because there was no time for another unit."""

    received: signal.Signals | None = None
    out_of_time: bool = False


def wants_back(stop: Stop, end_time: float | None, now: float) -> bool:
    """Whether it was the clock that stopped the worker, and not a person or its own end.

    USR1 is the warning before the time limit. TERM is the limit itself, but scancel's word as well, and what
    comes before Slurm's own requeue: it counts only once the time is up. end_time, now: of the wall clock.
    """
    time_is_up = end_time is not None and now >= end_time - _CLOCK_SKEW_S
    by_the_clock = stop.received is signal.SIGUSR1 or (stop.received is signal.SIGTERM and time_is_up)
    return stop.out_of_time or by_the_clock


def leave(
    exit_code: int,
    stop: Stop,
    is_complete: Callable[[], bool],
    config: ClusterConfig,
    environment: Mapping[str, str],
    now: float | None = None,
) -> int:
    """Ask for another life where that is due, and say so on standard error. Gives the exit code to use.

    is_complete: whether nothing of the job is left, whoever would do it; asked only if it matters.
    """
    task = SlurmTask.from_environment(environment)
    if config.requeue is Requeue.never or task is None:
        return exit_code
    end = environment.get("SLURM_JOB_END_TIME")
    if not wants_back(stop, float(end) if end else None, time.time() if now is None else now):
        return exit_code
    if is_complete():
        # The warning came when there was nothing left to be warned of.
        return 0
    # Not SLURM_JOB_ID: the one of an array's last task means the whole array as well.
    name = task.job if task.array_task is None else f"{task.job}_{task.array_task}"
    if task.restarts >= config.max_restarts:
        _say(f"{name} has had its cluster.max_restarts={config.max_restarts} and does not come back")
        return exit_code
    _say(f"{name} comes back: restart {task.restarts + 1} of at most {config.max_restarts}")
    if config.requeue is Requeue.exit_code:
        return EXIT_REQUEUE
    _requeue(name)
    return exit_code


def _requeue(name: str) -> None:
    try:
        done = subprocess.run(
            ["scontrol", "requeue", name], capture_output=True, text=True, timeout=_SCONTROL_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _say(f"scontrol requeue {name} could not be run: {error}")
        return
    if done.returncode:
        _say(f"scontrol requeue {name} was refused: {done.stderr.strip()}")


def _say(text: str) -> None:
    print(f"tokenmill: {text}", file=sys.stderr, flush=True)
