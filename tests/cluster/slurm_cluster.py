"""A real Slurm cluster on this host, for a few tests: munged, slurmctld and four slurmd, all private.

Started without the host's services, on free ports, in a folder of its own; stopped by process id. Runs as any
user, who then is Slurm's user too. Knows Slurm; refuses to know what its jobs do.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.slurm_config import CONFIG, KILL_WAIT_S, NODES, write_files

_SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
_CALL_S = 20.0


@dataclass(frozen=True)
class SlurmJob:
    """A job, or one task of an array, as `scontrol show job` has it."""

    id: str
    fields: Mapping[str, str]

    @property
    def name(self) -> str:
        """17_3 for a task of an array that has its own record, 17_[4-7%2] for those that wait together."""
        array, task = self.fields.get("ArrayJobId"), self.fields.get("ArrayTaskId")
        return f"{array}_{task}" if array and task else self.id

    @property
    def state(self) -> str:
        return self.fields["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.fields["Restarts"])


def missing_daemons() -> list[str]:
    return [name for name in DAEMONS if shutil.which(name, path=_SEARCH) is None]


class SlurmCluster:
    """Context manager. env: what a process needs to speak to this cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / CONFIG
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))
        }
        self.env |= {"PATH": _SEARCH, "SLURM_CONF": str(self.config)}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            write_files(self.folder)
            self._start_munged()
            self._start("slurmctld", "slurmctld", "-D", "-f", self.config)
            for node in NODES:
                self.start_node(node)
            self.until(lambda: self.idle_nodes() == set(NODES), 30, "not all nodes are idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.run("scancel", "--me")
            self.until(lambda: not self.run("squeue", "--noheader"), KILL_WAIT_S + 5, "jobs are left")
        # The nodes first: a controller that goes before them lets them wait for it.
        for name in reversed(self._daemons):
            self._daemons[name].terminate()
        for daemon in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            daemon.kill()
            daemon.wait()
        for pid in self._processes():
            # A step's daemon can outlive its node's.
            _kill(pid)

    # ------------------------------------------------------------ what users do

    def run(self, *words: str | Path, **env: str) -> str:
        """A command of Slurm's; its output. Raises CalledProcessError, or TimeoutExpired: srun waits for ever
        for a node that is down."""
        done = subprocess.run(
            list(map(str, words)),
            env={**self.env, **env},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=_CALL_S,
        )
        if done.returncode:
            raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, *words: str | Path, **env: str) -> str:
        """The id of what sbatch queued."""
        return self.run("sbatch", "--parsable", *words, **env)

    def jobs(self, job: str) -> list[SlurmJob]:
        """The tasks of an array, or the one job. Those that wait together are one record."""
        lines = self.run("scontrol", "show", "job", "-o", job).splitlines()
        found = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
        return [SlurmJob(fields["JobId"], fields) for fields in found]

    def job(self, name: str) -> SlurmJob:
        """A job, or a task by ARRAY_TASK."""
        return self.jobs(name)[0]

    def running(self, job: str) -> list[str]:
        return [task.name for task in self.jobs(job) if task.state == "RUNNING"]

    def is_over(self, job: str) -> bool:
        active = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED")
        return not any(task.state in active for task in self.jobs(job))

    def until(self, happened: Callable[[], bool], seconds: float, else_: str) -> None:
        deadline = time.monotonic() + seconds
        while not happened():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            assert not dead, [(self.folder / "log" / f"{name}.out").read_text() for name in dead]
            assert time.monotonic() < deadline, f"{else_} after {seconds} s\n{self._queue()}"
            time.sleep(0.1)

    # ------------------------------------------------------------ what happens to nodes

    def idle_nodes(self) -> set[str]:
        with contextlib.suppress(subprocess.CalledProcessError):
            return set(self.run("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split())
        return set()

    def start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-N", name, "-f", self.config)

    def lose_node(self, name: str) -> None:
        """What a machine that goes dark takes with it: its daemon, the steps' daemons, and their tasks."""
        daemon = self._daemons.pop(name)
        # All stop before any is killed, so that none can report another one's end.
        pids = [daemon.pid, *self._processes(name)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        for pid in {*pids, *self._processes(name)}:
            _kill(pid)
        daemon.wait()

    # ------------------------------------------------------------ processes and files

    def _processes(self, node: str | None = None) -> Iterator[int]:
        """Processes of this cluster's jobs and the daemons of their steps, of one node or of all."""
        mine = f"SLURM_CONF={self.config}".encode()
        for proc in Path("/proc").glob("[0-9]*"):
            pid = int(proc.name)
            if pid == os.getpid():
                continue
            with contextlib.suppress(OSError):
                environment = (proc / "environ").read_bytes().split(b"\0")
                of_node = node is None or f"SLURMD_NODENAME={node}".encode() in environment
                if mine in environment and of_node and b"SLURM_JOB_ID" in b"".join(environment):
                    yield pid
                elif (proc / "comm").read_text() == "slurmstepd\n" and self._logs(node) & _open_files(proc):
                    yield pid

    def _logs(self, node: str | None) -> set[str]:
        return {f"{self.folder}/log/slurmd-{name}.log" for name in ([node] if node else NODES)}

    def _queue(self) -> str:
        with contextlib.suppress(subprocess.SubprocessError):
            return self.run("squeue", "--all") + "\n" + self.run("sinfo", "--Node", "--long")
        return ""

    def _start(self, name: str, *words: str | Path) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                list(map(str, words)),
                env=self.env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _start_munged(self) -> None:
        private, socket_ = self.folder / "munge", self.folder / "munge.sock"
        names = {"key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        options = [f"--{option}={private / name}" for option, name in names.items()]
        self._start("munged", "munged", "--foreground", "--num-threads=2", f"--socket={socket_}", *options)
        self.until(socket_.exists, 10, "munged made no socket")


def _open_files(proc: Path) -> set[str]:
    return {os.readlink(link) for link in (proc / "fd").iterdir()}


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
