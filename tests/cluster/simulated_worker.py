"""One simulated process: what `pipeline/job.py` does, with an engine that is made up.

Knows: the three threads of a worker, and in which order they call the protocol. Refuses to know: faults,
other workers.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.schedule import TurnLock
from cluster.simulated_job import Worker
from fake_jobs import complete

from pipeline.cluster.claims import Claims
from pipeline.cluster.time_limit import TimeLimit
from pipeline.cluster.watch import Watch
from pipeline.cluster.work import Work
from pipeline.cluster.workers import Member
from pipeline.config import OutputConfig
from pipeline.input.rows import Row
from pipeline.output.progress import JobDirectory
from pipeline.output.writer import OutputWriter
from pipeline.store import FileStore

if TYPE_CHECKING:
    from cluster.simulator import Simulation

LEASE_S = 30.0
# An engine that stands still for so long gives no more signs of life.
STALL_S = 50.0
_HEARTBEAT_S = 6.0


@dataclass(frozen=True)
class Settings:
    """How a worker is: row_s: mean time of a row in one of its slots. queue: rows read ahead."""

    retry: bool
    limit: TimeLimit
    slots: int
    row_s: float
    queue: int
    commit_s: float
    part_bytes: int
    hint: float | None


class SimulatedProcess:
    """One process: its main thread, the one that reads ahead, the one that beats."""

    def __init__(self, simulation: Simulation, worker: Worker, settings: Settings) -> None:
        self._simulation = simulation
        self._schedule = simulation.schedule
        self._chance = simulation.chance
        self._worker = worker
        self._settings = settings
        self._queue: list[tuple[Row, int]] = []
        self._fed = False
        self._error: Exception | None = None
        # its own, as a process has it: what it knows of folders is its own affair
        self._store = store = FileStore()
        job, clock, wall = simulation.job, simulation.clock_now, simulation.wall_now
        self._member = Member(
            store,
            job,
            worker.name,
            worker.process,
            worker.slurm,
            stall_s=STALL_S,
            incarnation=worker.incarnation,
            clock=lambda: simulation._clock(worker),
            wall=wall,
        )
        self._member._lock = TurnLock(self._schedule)
        self._watch = Watch(store, job, self._member, LEASE_S, clock)

    def run(self) -> None:
        try:
            self._live()
        except OSError:
            self._simulation._count("ended by an error")
        except ValueError as error:
            # a file that could not be read is called damaged
            if not isinstance(error.__cause__, OSError):
                raise
            self._simulation._count("ended by an error")
        self._worker.over = True

    def _live(self) -> None:
        settings, simulation = self._settings, self._simulation
        template = simulation.directory
        self._store.make_folder(simulation.job)
        self._member.join()
        self._directory = JobDirectory.open(
            simulation.job, template.plan, template.index, self._watch.is_alone, self._store
        )
        self._claims = claims = Claims(
            self._directory,
            self._member,
            self._watch,
            retry_errors=settings.retry,
            hint=settings.hint,
            limit=settings.limit,
            poll_s=3.0,
            clock=simulation.clock_now,
            wall=simulation.wall_now,
        )
        claims.commit_lock = TurnLock(self._schedule)
        claims.wait = lambda seconds: self._schedule.sleep(self._chance.uniform(0.5, 2.0))  # type: ignore[method-assign]
        self._schedule.spawn(f"{self._worker.name}/beat", self._worker, self._beat)
        reason = "done"
        try:
            output_writer = self._writer()
            work = Work(claims, self._stopped, output_writer.commit)
            if work.begin():
                self._schedule.sleep(self._chance.uniform(0, 10))
                self._member.note_loaded()
                self._generate(work, output_writer)
            self._worker.verdict = work.verdict
            if work.is_complete:
                simulation.require_complete(self._worker.name)
        except (OSError, ValueError) as error:
            reason = type(error).__name__
            raise
        finally:
            self._fed = True
            with contextlib.suppress(OSError):
                self._member.leave(reason)

    def _stopped(self) -> bool:
        return self._worker.told_to_leave or self._settings.limit.is_over

    def _beat(self) -> None:
        while not self._worker.over and self._member.record.ended is None:
            with contextlib.suppress(OSError):
                self._member.beat(self._claims.held())
            self._schedule.sleep(self._chance.uniform(0.2, 1.0) * _HEARTBEAT_S)

    def _feed(self, work: Work) -> None:
        """What ReadAhead's thread does: claims come as rows are wanted."""
        rows = self._simulation.rows
        try:
            for claim in work:
                for wanted in claim.ranges():
                    for row in rows[wanted.start : wanted.stop]:
                        self._queue += [(row, sample) for sample in claim.samples(row)]
                while len(self._queue) >= self._settings.queue and not self._fed:
                    self._schedule.sleep(self._chance.uniform(0.2, 1.0))
        except Exception as error:
            # for the main thread, if that still asks
            self._error = error
        self._fed = True

    def _writer(self) -> OutputWriter:
        settings = self._settings
        output = OutputConfig(
            dir="unused", commit_interval_s=settings.commit_s, max_part_bytes=settings.part_bytes
        )
        made = self._directory.writer(
            output,
            self._claims,
            self._member.incarnation,
            self._worker.name,
            started=self._simulation.wall_now(),
        )
        made._lock = TurnLock(self._schedule)  # type: ignore[assignment]
        return made

    def _generate(self, work: Work, output_writer: OutputWriter) -> None:
        with output_writer, work:
            self._schedule.spawn(f"{self._worker.name}/feed", self._worker, lambda: self._feed(work))
            running: list[tuple[float, Row, int]] = []
            while not self._stopped():
                fed = self._fed
                if self._error is not None:
                    raise self._error
                self._admit(running)
                if fed and not self._queue and not running:
                    break
                self._schedule.sleep(self._chance.uniform(0.1, 1.0) + self._worker.hangs_s)
                self._worker.hangs_s = 0.0
                output_writer.commit_if_due()
                self._member.tick()
                running = self._end_some(running, output_writer)

    def _admit(self, running: list[tuple[float, Row, int]]) -> None:
        while self._queue and len(running) < self._settings.slots:
            row, sample = self._queue.pop(0)
            if self._claims.admit(complete(row, sample).request, sample):
                seconds = self._chance.expovariate(1 / self._settings.row_s)
                running.append((self._schedule.now + seconds, row, sample))

    def _end_some(
        self, running: list[tuple[float, Row, int]], output_writer: OutputWriter
    ) -> list[tuple[float, Row, int]]:
        now, simulation = self._schedule.now, self._simulation
        for end, row, sample in running:
            if end <= now and output_writer.append(complete(row, sample, lambda _: simulation.fails())):
                simulation.made[row.ordinal, sample] += 1
        return [entry for entry in running if entry[0] > now]
