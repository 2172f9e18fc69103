"""A worker's record: what it tells the others, and the counter by which they see that it lives.

Knows: the record's form, how it is written and read. Refuses to know: units beyond their numbers, threads.
Times in it are for people; nothing is decided by them.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cluster.processes import Process, SlurmTask
from pipeline.output.layout import record_path
from pipeline.store import Store


@dataclass(frozen=True)
class WorkerRecord:
    """One incarnation, as it last said.

    counter: grows with every beat. held: units it has not finished, and whether it has begun them.
    busy_s: time the engine computed. ended: why it left, None while it works. Times in seconds since 1970.
    """

    incarnation: str
    worker: str
    counter: int
    process: Process
    slurm: SlurmTask | None
    started: float
    loaded: float | None
    beat: float
    held: tuple[tuple[int, bool], ...]
    busy_s: float
    tokens: int
    rows: int
    gpu_hour_usd: float
    ended: str | None

    def encode(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self)) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> WorkerRecord:
        """Raises ValueError if the data are no record."""
        try:
            fields = json.loads(data)
            fields["process"] = Process(**fields["process"])
            fields["slurm"] = None if fields["slurm"] is None else SlurmTask(**fields["slurm"])
            fields["held"] = tuple((int(unit), bool(started)) for unit, started in fields["held"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"is no worker record ({error!r})") from error


def read_record(store: Store, job: Path, incarnation: str) -> WorkerRecord | None:
    """None if there is none, or none that can be read: its worker then lives as long as others think so."""
    try:
        return WorkerRecord.decode(store.read(record_path(job, incarnation)))
    except (FileNotFoundError, ValueError):
        return None


class Member:
    """This process among the workers of a job: its record, and when it is written.

    `tick` says that the engine's loop goes on. Once it has not for stall_s seconds, beats no longer count up
    and the others take over: a GPU that hangs loses its units. Safe to use from several threads.
    """

    def __init__(
        self,
        store: Store,
        job: Path,
        worker: str,
        process: Process,
        slurm: SlurmTask | None = None,
        *,
        gpu_hour_usd: float = 0.0,
        stall_s: float = 600.0,
        started: float | None = None,
        incarnation: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._job = job
        self._stall_s = stall_s
        self._clock = clock
        self._wall = wall
        # guards the record; held while it is written, so that no beat comes after the end
        self._lock = threading.Lock()
        self._ticked = clock()
        # set when the others should hear of something soon
        self.news = threading.Event()
        now = wall()
        self._record = WorkerRecord(
            incarnation=incarnation or f"{worker}.{secrets.token_hex(4)}",
            worker=worker,
            counter=0,
            process=process,
            slurm=slurm,
            started=now if started is None else started,
            loaded=None,
            beat=now,
            held=(),
            busy_s=0.0,
            tokens=0,
            rows=0,
            gpu_hour_usd=gpu_hour_usd,
            ended=None,
        )

    @property
    def incarnation(self) -> str:
        return self._record.incarnation

    @property
    def record(self) -> WorkerRecord:
        return self._record

    def join(self) -> None:
        """Writes the first record: from now on the others see this worker."""
        with self._lock:
            self._write()

    def tick(self) -> None:
        self._ticked = self._clock()

    def note_loaded(self) -> None:
        with self._lock:
            self._record = dataclasses.replace(self._record, loaded=self._wall())
        self.tick()

    def note_work(self, rows: int, tokens: int, busy_s: float) -> None:
        """What was done so far; goes out with the next beat."""
        with self._lock:
            self._record = dataclasses.replace(self._record, rows=rows, tokens=tokens, busy_s=busy_s)

    def beat(self, held: Sequence[tuple[int, bool]] = ()) -> bool:
        """Tells the others that this worker lives; False if it has stalled or left, and nothing was said."""
        with self._lock:
            if self._record.ended is not None or self._clock() - self._ticked > self._stall_s:
                return False
            counter = self._record.counter + 1
            self._record = dataclasses.replace(
                self._record, counter=counter, held=tuple(held), beat=self._wall()
            )
            self._write()
            return True

    def leave(self, reason: str) -> None:
        """Says that this worker does nothing more: all of its units are free at once."""
        with self._lock:
            if self._record.ended is None:
                self._record = dataclasses.replace(self._record, ended=reason, held=(), beat=self._wall())
                self._write()

    def _write(self) -> None:
        self._store.replace(record_path(self._job, self.incarnation), self._record.encode())
