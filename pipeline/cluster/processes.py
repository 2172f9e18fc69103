"""Which process a worker is, so that another one on the same machine can see at once that it is gone.

Knows: /proc, and what Slurm tells its tasks in the environment. Refuses to know: jobs, files of ours.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
# Fields of /proc/PID/stat behind the name in brackets: state is the first, the start time the 20th.
_STATE, _START_TIME = 0, 19
_OVER = ("Z", "X")


@dataclass(frozen=True)
class Process:
    """A process by name. boot_id, pid_namespace, start_time (in clock ticks since boot): None if unknown."""

    host: str
    pid: int
    boot_id: str | None
    pid_namespace: str | None
    start_time: int | None

    @classmethod
    def current(cls) -> Process:
        pid = os.getpid()
        stat = _stat(pid)
        return cls(
            host=socket.gethostname(),
            pid=pid,
            boot_id=_text(_BOOT_ID),
            pid_namespace=_link(_PID_NAMESPACE),
            start_time=int(stat[_START_TIME]) if stat else None,
        )

    def is_known_gone_to(self, observer: Process) -> bool:
        """Whether the observer, who must be running now, can tell that this process is over."""
        places = [(p.host, p.boot_id, p.pid_namespace) for p in (self, observer)]
        if places[0] != places[1] or None in places[0]:
            # somewhere else, or nobody knows where: only its silence can tell
            return False
        stat = _stat(self.pid)
        if stat is None:
            return not Path(f"/proc/{self.pid}").exists()
        return stat[_STATE] in _OVER or int(stat[_START_TIME]) != self.start_time


def _stat(pid: int) -> list[str] | None:
    text = _text(Path(f"/proc/{pid}/stat"))
    # the name may hold blanks and brackets
    return text.rpartition(")")[2].split() if text else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _link(path: Path) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


@dataclass(frozen=True)
class SlurmTask:
    """A task of a Slurm job. array_task: None outside arrays. restarts: how often it was requeued before."""

    job: str
    array_task: int | None
    restarts: int
    # where in its array the task is, 0 to 1
    place: float | None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> SlurmTask | None:
        """None outside Slurm."""
        restarts = int(environment.get("SLURM_RESTART_COUNT") or 0)
        array_job, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
        if array_job and task:
            first = int(environment.get("SLURM_ARRAY_TASK_MIN") or 0)
            last = int(environment.get("SLURM_ARRAY_TASK_MAX") or task)
            # not the task count: an array's step leaves numbers out
            place = (int(task) - first) / max(last - first + 1, 1)
            return cls(array_job, int(task), restarts, min(max(place, 0.0), 1.0))
        job = environment.get("SLURM_JOB_ID")
        return cls(job, None, restarts, None) if job else None

    def is_earlier_life_of(self, other: SlurmTask) -> bool:
        """Slurm starts a task again only after it has ended the one before."""
        same = (self.job, self.array_task) == (other.job, other.array_task)
        return same and self.restarts < other.restarts
