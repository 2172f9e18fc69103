"""`launcher=local`: one command line, several workers of this machine on one job.

Knows: what each worker's command line and environment are, what is shown while they work, and which exit
code it all comes to. Refuses to know: how processes are kept (`cluster/local_workers.py`), models, rows. The
workers share the job by the same protocol as those of other machines, which may be at work on it as well.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig

from pipeline.cluster.local_workers import Ended, LocalWorkers, WorkerCommand, visible_gpus
from pipeline.cluster.requeue import EXIT_REQUEUE, Stop, leave
from pipeline.config import Device, JobConfig, Requeue
from pipeline.report.status import JobStatus
from pipeline.report.status_line import StatusLine
from pipeline.report.status_text import progress_line, render
from pipeline.report.summary import next_steps
from pipeline.schema_store import WORKER_NAME, worker_name
from pipeline.status import status
from pipeline.store import open_store

LOGS = "logs"
_TICK_S = 0.1
# A look at a large job takes its time: of all time at most this share.
_STATUS_SHARE = 0.1
# As in report/outcome.py: nothing is wrong, the job is not complete.
_EXIT_INCOMPLETE = 75
_BY_SIGNAL = 128


def launch(job: JobConfig, folder: Path) -> int:
    """Runs the job's workers until the last has ended. Gives the exit code.

    folder: where this run's own files go, the workers' logs among them. Raises ValueError for a number of
    workers that there cannot be.
    """
    commands = worker_commands(job, folder / LOGS, os.environ)
    line = StatusLine()
    names = f"{commands[0].name} to {commands[-1].name}" if len(commands) > 1 else commands[0].name
    line.say(f"{len(commands)} local workers, {names}; logs: {folder / LOGS}")
    reports, codes = _Reports(), list[int]()
    next_look = time.monotonic() + job.report.interval_s
    with LocalWorkers(commands) as workers:
        while workers.num_running:
            for ended in workers.poll():
                codes.append(ended.code)
                for text in reports.of(ended, stopping=workers.received is not None):
                    line.say(f"tokenmill: {text}")
            if time.monotonic() >= next_look:
                next_look = _look(job, line)
            time.sleep(_TICK_S)
        received = workers.received
    line.end()
    state = _status(job)
    if state is not None:
        print("\n".join([render(state), *next_steps(job.output.dir, not state.complete)]))
    code = exit_code(codes, received, state is not None and state.complete)
    if EXIT_REQUEUE in codes and code:
        # each of them would have ended the task that all of them live in
        return leave(code, Stop(out_of_time=True), lambda: False, job.cluster, os.environ)
    return code


def exit_code(codes: Collection[int], received: int | None, complete: bool) -> int:
    """0 for a complete job, or one whose rest others make; else the worst of what the workers came to: an
    error, a signal, the same command again."""
    codes = [_EXIT_INCOMPLETE if code == EXIT_REQUEUE else code for code in codes]
    errors = [code for code in codes if code not in (0, _EXIT_INCOMPLETE) and code < _BY_SIGNAL]
    if complete:
        return 0
    if errors:
        return errors[0]
    return max([_BY_SIGNAL + received] if received is not None else codes, default=_EXIT_INCOMPLETE)


def worker_commands(job: JobConfig, logs: Path, environment: Mapping[str, str]) -> list[WorkerCommand]:
    """One for each worker. Raises ValueError for a number of workers that there cannot be."""
    gpus = [] if job.model.device is Device.cpu else visible_gpus(environment)
    count = _num_workers(job, len(gpus))
    words = [*_command_line(), *_own_keys(job, count)]
    # what hydra is told so that this process words errors its own way is none of theirs
    shared = {key: value for key, value in environment.items() if key != "HYDRA_FULL_ERROR"}
    shared.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // count, 1)))
    commands = []
    for number in range(count):
        name = f"{worker_name()}-w{number}"
        own = {WORKER_NAME: name}
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = gpus[number]
        commands.append(WorkerCommand(name, words, {**shared, **own}, logs / f"{name}.log"))
    return commands


def _num_workers(job: JobConfig, num_gpus: int) -> int:
    wanted = job.launcher.num_workers
    if job.model.device is Device.cuda and not num_gpus:
        raise ValueError("model.device=cuda, and launcher=local finds no GPU: use model.device=cpu")
    if num_gpus and wanted is not None and wanted > num_gpus:
        raise ValueError(
            f"launcher.num_workers={wanted} is more than the {num_gpus} visible GPUs: lower it, or leave it "
            "null for one worker on each"
        )
    if not num_gpus and wanted is None:
        raise ValueError(
            "launcher=local finds no GPU to start a worker on: launcher.num_workers=2 starts two on the CPU"
        )
    return wanted or num_gpus


def _command_line() -> list[str]:
    """What started this process, for this job alone where it is one of a sweep."""
    words = sys.argv[1:]
    overrides = get_args_parser().parse_args(words).overrides
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(words)]
    flags = [word for word in words if word not in overrides and word not in ("-m", "--multirun")]
    hydras = [word for word in overrides if word.lstrip("+~").startswith("hydra")]
    return [sys.executable, *before, *flags, *hydras, *HydraConfig.get().overrides.task]


def _own_keys(job: JobConfig, count: int) -> list[str]:
    """What differs for a worker: the last word on a key wins."""
    asks = Requeue.never if job.cluster.requeue is Requeue.never else Requeue.exit_code
    keys = ["launcher.kind=none", f"cluster.requeue={asks.value}"]
    if job.cost.max_usd is not None:
        # the budget is that of the command, and each worker counts its own time
        keys.append(f"cost.max_usd={job.cost.max_usd / count!r}")
    return keys


def _look(job: JobConfig, line: StatusLine) -> float:
    """Shows how far the job is. Returns when to look again."""
    began = time.monotonic()
    state = _status(job)
    if state is not None:
        line.show(progress_line(state))
    ended = time.monotonic()
    return max(began + job.report.interval_s, ended + (ended - began) / _STATUS_SHARE)


def _status(job: JobConfig) -> JobStatus | None:
    """None while there is no job yet, or none that can be read: workers say what is wrong with it."""
    try:
        store = open_store(job.output.dir, job.output.storage_options, job.output.stage_dir)
        return status(job.output.dir, lease_s=job.cluster.lease_s, store=store)
    except (ValueError, OSError):
        return None


@dataclass
class _Reports:
    """What to say of workers that ended before their time; the same reason once."""

    said: set[str] = field(default_factory=set)

    def of(self, ended: Ended, stopping: bool) -> Sequence[str]:
        """stopping: all were told to."""
        if ended.code in (0, _EXIT_INCOMPLETE, EXIT_REQUEUE) or (stopping and ended.code >= _BY_SIGNAL):
            return []
        if ended.by is not None:
            return [f"worker {ended.name} was killed by {ended.by.name}; the others go on; log: {ended.log}"]
        how = f"worker {ended.name} ended with exit code {ended.code}"
        if ended.words is None:
            return [f"{how}; log: {ended.log}"]
        if ended.words in self.said:
            return [f"{how}, for the same reason; log: {ended.log}"]
        self.said.add(ended.words)
        return [f"{how}; log: {ended.log}", ended.words]
