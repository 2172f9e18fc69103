"""Who is alive, as one worker sees it.

Knows: records and this machine's monotonic clock. A worker lives while its counter moves; how long it has
stood still is timed here, from the first look on, so that no two clocks are ever compared. Refuses to know:
what is done about the dead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pipeline.cluster.workers import Member, WorkerRecord, read_record
from pipeline.output.layout import incarnations
from pipeline.store import Store


class Liveness(Enum):
    alive = "alive"
    # not seen moving yet, and not looked at for long enough to be sure of the contrary
    unknown = "unknown"
    dead = "dead"


@dataclass(frozen=True)
class _Sight:
    """counter: as last seen, None without a record. since: when first seen so. moved: when it last moved."""

    counter: int | None
    since: float
    moved: float | None


class Watch:
    """lease_s: after so many seconds of standstill a worker counts as dead."""

    def __init__(
        self,
        store: Store,
        job: Path,
        me: Member,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._job = job
        self._me = me
        self._lease_s = lease_s
        self._clock = clock
        self._sights: dict[str, _Sight] = {}

    def look(self, incarnation: str) -> tuple[Liveness, WorkerRecord | None]:
        """Reads a worker's record and judges it by that and by what was seen before."""
        if incarnation == self._me.incarnation:
            return Liveness.alive, self._me.record
        record = read_record(self._store, self._job, incarnation)
        sight = self._note(incarnation, None if record is None else record.counter)
        if record is not None and self._is_over(record):
            return Liveness.dead, record
        if self._clock() - sight.since > self._lease_s:
            return Liveness.dead, record
        return (Liveness.unknown if sight.moved is None else Liveness.alive), record

    def moved_since(self, incarnation: str, moment: float) -> bool:
        """Whether a worker was seen moving at or after a moment of the clock."""
        sight = self._sights.get(incarnation)
        return sight is not None and sight.moved is not None and sight.moved >= moment

    def is_alone(self) -> bool:
        """Whether every other worker is known to be dead."""
        others = set(incarnations(self._job, self._store)) - {self._me.incarnation}
        return all(self.look(other)[0] is Liveness.dead for other in others)

    def _note(self, incarnation: str, counter: int | None) -> _Sight:
        now, sight = self._clock(), self._sights.get(incarnation)
        if sight is None:
            sight = _Sight(counter, now, None)
        elif sight.counter != counter:
            sight = _Sight(counter, now, now)
        self._sights[incarnation] = sight
        return sight

    def _is_over(self, record: WorkerRecord) -> bool:
        me = self._me.record
        if record.ended is not None or record.process.is_known_gone_to(me.process):
            return True
        return record.slurm is not None and me.slurm is not None and record.slurm.is_earlier_life_of(me.slurm)
