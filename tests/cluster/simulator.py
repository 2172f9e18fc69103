"""Workers, as the protocol makes them, on simulated hosts: one seed is one run, faults and all.

Knows: who starts when, and what befalls hosts, disks, processes and clocks. Refuses to know: the protocol,
which runs here as it is, down to pipeline/durable.py, and what must be true in the end
(`simulated_audit.py`).

    PYTHONPATH=.:tests python -m cluster.simulator SEED            replays a seed and shows its trace
    PYTHONPATH=.:tests python -m cluster.simulator FIRST..LAST     runs many, shows figures
"""

from __future__ import annotations

import errno
import os
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from cluster import simulated_audit
from cluster.schedule import Crash, Schedule
from cluster.simulated_disk import EVERYWHERE, STALE_S, Disk
from cluster.simulated_job import Host, Shape, Worker, job_of
from cluster.simulated_worker import LEASE_S, STALL_S, Settings, SimulatedProcess

from pipeline.cluster import processes
from pipeline.cluster.claims import Verdict
from pipeline.cluster.processes import Process, SlurmTask
from pipeline.cluster.time_limit import TimeLimit
from pipeline.output import part, progress, writer
from pipeline.output.chains import Lease, Leases
from pipeline.output.part import PartWriter
from pipeline.output.progress import JobDirectory
from pipeline.store import FileStore

_MOST_TURNS = 60_000
_MOST_S = 5_000.0
# Faults befall the workers until then; whoever is left afterwards must come to an end.
_CHAOS_S = 150.0
_CAN_FAIL = {"create", "write", "sync", "sync folder", "rename", "link", "mkdir", "read", "list", "look"}
# Per operation, where a seed has the fault at all.
_RATES = {"kill": 0.004, "error": 0.003, "stall": 0.004, "freeze": 0.002, "lost reply": 0.05}
# Per look of the director, every few seconds.
_EVENTS = {
    "host cut": 0.06,
    "power cut": 0.04,
    "clock jump": 0.1,
    "leave": 0.06,
    "hang": 0.05,
    "full disk": 0.05,
}


@dataclass
class Outcome:
    """How a seed ended. trace: a checksum of every operation in turn."""

    seed: int
    turns: int
    seconds: float
    trace: int
    counts: Counter[str]


class Simulation:
    """One run. `run` returns when all is over and everything was checked; raises AssertionError."""

    def __init__(self, seed: int, show: bool = False) -> None:
        self.seed = seed
        self.chance = chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._show = show
        self._trace = 0
        self._faulty = True
        self._full_until = 0.0
        self.schedule = Schedule(_MOST_TURNS, _MOST_S)
        remote = chance.random() < 0.7
        self._hosts = [Host(f"host{n}", monotonic=chance.uniform(0, 1e6)) for n in range(3 if remote else 1)]
        self.disk = Disk(chance, self._step, self._host, lambda: self.schedule.now, remote)
        self.shape = Shape(chance.choice((2, 3, 5, 9)), chance.choice((1, 2)), chance.random() < 0.3)
        template, self.rows = job_of(self.shape)
        self.job = self.disk.path("/shared/job")
        self.directory = JobDirectory(self.job, template.plan, template.index, FileStore())  # type: ignore[arg-type]
        self.has = {name for name in (*_RATES, *_EVENTS) if chance.random() < 0.5}
        self._error_share = chance.choice((0.0, 0.0, 0.1))
        self.workers: list[Worker] = []
        # what workers were told is durable: leases by unit and fence; (part, commit)
        self.leases: dict[tuple[int, int], Lease] = {}
        self.commits: list[tuple[str, Any]] = []
        self.made: Counter[tuple[int, int]] = Counter()

    # ---------------------------------------------------------------- the run

    def run(self) -> Outcome:
        with self.disk.mounted(), self._watched():
            try:
                self._prepare()
                self._chaos()
                self._faulty = False
                self._finish(retry=False)
                if self.chance.random() < 0.5:
                    self._cut_everything()
                # whoever starts on an old listing does not see what there is to try again
                self.schedule.sleep(STALE_S)
                self._finish(retry=True)
                self._until_all_are_over()
            finally:
                self.schedule.end()
            self._show = False
            simulated_audit.audit(self)
        return Outcome(self.seed, self.schedule.num_turns, self.schedule.now, self._trace, self.counts)

    def _prepare(self) -> None:
        self.disk.folders, self.disk.safe_folders = {"/shared"}, {"/shared"}

    def _chaos(self) -> None:
        """Workers come and go until the time is over, or no more are to come."""
        most, wanted = self.chance.randint(2, 9), self.chance.randint(1, 4)
        while self.schedule.now < _CHAOS_S and len(self.workers) < most:
            alive = [worker for worker in self.workers if not worker.over]
            if len(alive) < wanted:
                self._start(retry=self.chance.random() < 0.3)
            self.schedule.sleep(self.chance.uniform(0.5, 12))
            self._befall(alive)
        self.schedule.sleep(self.chance.uniform(0, 40))

    def _befall(self, alive: list[Worker]) -> None:
        for name, rate in _EVENTS.items():
            if name not in self.has or self.chance.random() > rate:
                continue
            self._count(name)
            if name == "host cut":
                self._cut_host(self.chance.choice(self._hosts))
            elif name == "power cut":
                self._cut_everything()
            elif name == "clock jump":
                self.chance.choice(self._hosts).wall += self.chance.choice((-1e7, -3600.0, 3600.0, 1e9))
            elif name == "full disk":
                self._full_until = self.schedule.now + self.chance.uniform(1, 20)
            elif alive and name == "leave":
                self.chance.choice(alive).told_to_leave = True
            elif alive:
                self.chance.choice(alive).hangs_s = self.chance.uniform(0.5, 2.5) * STALL_S

    def _finish(self, retry: bool) -> None:
        """A fresh worker sees the job to its end, or leaves it to others that do."""
        for _ in range(4):
            worker = self._start(retry, lasting=True)
            while not worker.over:
                self.schedule.sleep(5.0)
            if worker.verdict is Verdict.complete:
                return
            assert worker.verdict is Verdict.with_others, worker.verdict
            self._until_all_are_over()
        raise AssertionError("the rest is always with others")

    def _until_all_are_over(self) -> None:
        while any(not worker.over for worker in self.workers):
            self.schedule.sleep(5.0)

    def _cut_host(self, host: Host) -> None:
        for worker in self.workers:
            if worker.host is host:
                worker.dead = worker.over = True
        host.boots += 1
        self.disk.cut_host(host.name)

    def _cut_everything(self) -> None:
        for host in self._hosts:
            self._cut_host(host)
        self.disk.cut_everything()

    # ---------------------------------------------------------------- a worker

    def _start(self, retry: bool, lasting: bool = False) -> Worker:
        """lasting: is not told to leave, has no time limit."""
        chance, number = self.chance, len(self.workers)
        host = chance.choice(self._hosts)
        boot = f"boot{host.boots}"
        worker = Worker(
            f"w{number}",
            incarnation=f"w{number}.{number:08x}",
            host=host,
            # above the largest pid of Linux, so that no real process is meant
            process=Process(host.name, 2**22 + 1 + number, boot, "pid:[1]", number),
            slurm=self._slurm_task(),
        )
        self.workers.append(worker)
        self._count("lives")
        limit = chance.uniform(40, 150) if not lasting and chance.random() < 0.2 else None
        settings = Settings(
            retry=retry,
            limit=self._limit_of(worker, limit),
            slots=chance.randint(1, 6),
            row_s=chance.choice((0.5, 2.0, 2.0, 8.0)),
            queue=chance.randint(1, 12),
            commit_s=chance.choice((1.0, 5.0, 15.0)),
            part_bytes=chance.choice((3_000, 20_000, 2**20)),
            hint=chance.choice((None, 0.0, 0.4, 0.9)),
        )
        self.schedule.spawn(worker.name, worker, SimulatedProcess(self, worker, settings).run)
        return worker

    def _limit_of(self, worker: Worker, seconds: float | None) -> TimeLimit:
        end = None if seconds is None else self._clock(worker) + seconds
        return TimeLimit(end, lambda: self._clock(worker))

    def _slurm_task(self) -> SlurmTask | None:
        """A task of an array, or the next life of one that is over."""
        if self.chance.random() < 0.5:
            return None
        ended = [w.slurm for w in self.workers if w.dead and w.slurm is not None]
        if ended and self.chance.random() < 0.7:
            task = self.chance.choice(ended)
            lives = [w.slurm.restarts for w in self.workers if w.slurm and w.slurm.job == task.job]
            if all(w.dead for w in self.workers if w.slurm and w.slurm.job == task.job):
                return replace(task, restarts=max(lives) + 1)
        return SlurmTask(f"job{len(self.workers)}", 3, 0, None)

    def require_complete(self, name: str) -> None:
        """Whoever says that all is there has to be right, but for what was just taken from somebody.

        A thief that read the journals before a commit and makes its lease after it voids that commit.
        """
        task, self.schedule.current = self.schedule.current, self.schedule.director
        try:
            lacking = simulated_audit.untouched_and_lacking(self)
        finally:
            self.schedule.current = task
        assert not lacking, f"{name} says that the job is complete, and units {lacking} lack rows"

    def fails(self) -> bool:
        return self._faulty and self.chance.random() < self._error_share

    # ---------------------------------------------------------------- what the disk asks

    def _host(self) -> str:
        life = self.schedule.current.life
        return life.host.name if isinstance(life, Worker) else EVERYWHERE

    def _step(self, operation: str, path: str) -> None:
        """Before every operation of the file system: time passes, others do things, and faults strike."""
        task = self.schedule.current
        life = task.life
        if life.dead:
            raise Crash(life.name)
        self._note(f"{task.name} {operation} {path}")
        fault = self._draw(operation) if self._faulty and isinstance(life, Worker) else None
        latency = self.chance.expovariate(50.0)
        if fault == "stall":
            latency += self.chance.uniform(0.3, 3.0) * LEASE_S
        if fault == "freeze":
            life.frozen_until = self.schedule.now + self.chance.uniform(0.3, 3.0) * LEASE_S
        if task.name != "director":
            self.schedule.sleep(latency)
        if fault == "kill":
            life.dead = True
            life.over = True  # type: ignore[attr-defined]
            raise Crash(life.name)
        if fault == "lost reply":
            raise TimeoutError(errno.ETIMEDOUT, "asked again")
        if fault == "error":
            number = self.chance.choice((errno.EIO, errno.ENOSPC))
            raise OSError(number, os.strerror(number), path)

    def _draw(self, operation: str) -> str | None:
        if self.schedule.now < self._full_until and operation in ("write", "create"):
            self._count("full")
            return "error"
        name = self.chance.choice(sorted(_RATES))
        fits = {"lost reply": operation == "link", "error": operation in _CAN_FAIL}.get(name, True)
        if not fits or name not in self.has or self.chance.random() > _RATES[name] * len(_RATES):
            return None
        self._count(f"{name} at {operation}" if name != "lost reply" else name)
        return name

    def _count(self, what: str) -> None:
        self.counts[what] += 1
        self._note(what)

    def _note(self, line: str) -> None:
        line = f"{self.schedule.now:.6f} {line}"
        self._trace = zlib.crc32(line.encode(), self._trace)
        if self._show:
            print(line)

    # ---------------------------------------------------------------- clocks, and what is written down

    def _clock(self, worker: Worker) -> float:
        return self.schedule.now + worker.host.monotonic

    def clock_now(self) -> float:
        life = self.schedule.current.life
        return self._clock(life) if isinstance(life, Worker) else self.schedule.now

    def wall_now(self) -> float:
        life = self.schedule.current.life
        return 1.7e9 + self.schedule.now + (life.host.wall if isinstance(life, Worker) else 0.0)

    def _stat_of(self, pid: int) -> list[str] | None:
        """What /proc says: of a process that is over, nothing."""
        worker = self.workers[pid - 2**22 - 1]
        assert worker.process is not None
        return None if worker.over else ["S", *["0"] * 18, str(worker.process.start_time)]

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Clocks and /proc are the simulated ones; what workers are told is durable is written down."""
        clocks = SimpleNamespace(monotonic=self.clock_now, time=self.wall_now)
        create, commit = Leases.create, PartWriter.commit
        real = (part.time, writer.time, processes._stat, progress.Path)

        def noted_create(leases: Leases, lease: Lease) -> bool:
            created = create(leases, lease)
            if created:
                assert (lease.unit, lease.fence) not in self.leases, f"{lease} was created twice"
                self.leases[lease.unit, lease.fence] = lease
            return created

        def noted_commit(part_writer: PartWriter, *arguments: Any) -> Any:
            done = commit(part_writer, *arguments)
            self.commits.append((part_writer.name, done))
            return done

        part.time = writer.time = clocks  # type: ignore[assignment]
        progress.Path = self.disk.path  # type: ignore[misc, assignment]
        processes._stat = self._stat_of
        Leases.create, PartWriter.commit = noted_create, noted_commit  # type: ignore[method-assign]
        try:
            yield
        finally:
            part.time, writer.time, processes._stat, progress.Path = real
            Leases.create, PartWriter.commit = create, commit  # type: ignore[method-assign]


def command(seed: int) -> str:
    """Shows a seed's run again."""
    return f"PYTHONPATH=.:tests python -m cluster.simulator {seed}"


def run(seed: int, show: bool = False) -> Outcome:
    """Raises AssertionError with the command that shows it again."""
    try:
        return Simulation(seed, show).run()
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {error}\nreplay: {command(seed)}") from error


def main() -> None:
    first, _, last = sys.argv[1].partition("..")
    if not last:
        print(run(int(first), show=True))
        return
    begun, counts, turns = time.monotonic(), Counter[str](), 0
    failed: list[int] = []
    for seed in range(int(first), int(last) + 1):
        try:
            outcome = run(seed)
        except AssertionError as error:
            failed.append(seed)
            print(str(error)[-1500:], flush=True)
            continue
        counts += outcome.counts
        turns += outcome.turns
    num_seeds, seconds = int(last) - int(first) + 1, time.monotonic() - begun
    print(f"{num_seeds} seeds, {len(failed)} failed {failed[:20]}, {turns:,} turns, {seconds:.0f} s")
    for name, count in sorted(counts.items()):
        print(f"{count:9,} {name}")


if __name__ == "__main__":
    main()
