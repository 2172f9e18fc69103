"""What other workers have left to do, and what of it one may take.

Knows: which units lack results, who holds them, who lives. Refuses to know: this worker's own units, and how
a unit is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.cluster.policy import choose_steal
from pipeline.cluster.watch import Liveness, Watch
from pipeline.cluster.workers import WorkerRecord
from pipeline.output.chains import Leases
from pipeline.output.layout import PUBLISHED_HOLDER
from pipeline.output.ledger import JournalScan, Ledger
from pipeline.output.progress import JobDirectory


@dataclass(frozen=True)
class Takeable:
    """A unit that may be taken over from the holder of its highest fence."""

    unit: int
    fence: int


class Others:
    """fences int [units]: the leases there were when this worker started."""

    def __init__(
        self,
        directory: JobDirectory,
        scan: JournalScan,
        leases: Leases,
        watch: Watch,
        incarnation: str,
        fences: np.ndarray,
    ) -> None:
        self._scan = scan
        self._leases = leases
        self._watch = watch
        self._incarnation = incarnation
        self._first_fences = fences
        self._sizes = np.diff(directory.units.starts()) * directory.samples
        # as of the last search: units that lack results, by their holder, who may be alive
        self.open: dict[int, str] = {}
        # and those whose leases a listing does not show yet (or that have none)
        self.unlisted = np.empty(0, np.int64)
        # results that were there
        self.num_done = 0

    def search(self, may_steal: bool, retry: bool) -> list[Takeable]:
        """Units that are to be taken over, in order; reads what the journals and leases have new.

        First those whose holder is gone, and with `retry` complete units with errors that nobody touched
        since this worker started; else, if it may steal, one that a living worker has not begun.
        Raises ValueError for damaged files, OSError.
        """
        fences, rows, errors = self.count()
        records: dict[str, tuple[Liveness, WorkerRecord | None]] = {}
        takeable: list[Takeable] = []
        self.open = {}
        self.unlisted = np.flatnonzero((rows != self._sizes) & (fences < 0))
        for unit in np.flatnonzero((rows != self._sizes) & (fences >= 0)).tolist():
            holder = self._leases.lease(unit, int(fences[unit])).incarnation
            if holder == self._incarnation:
                continue
            if holder is not None and holder not in records:
                records[holder] = self._watch.look(holder)
            if holder is None or records[holder][0] is Liveness.dead:
                takeable.append(Takeable(unit, int(fences[unit])))
            else:
                self.open[unit] = holder
        if retry:
            takeable += self._to_retry(fences, (rows == self._sizes) & (errors > 0))
        if takeable or not may_steal:
            return takeable
        return list(self._to_steal(fences, records))

    def count(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int [units] each: highest fences, results that are there, and those of them that are errors."""
        self._scan.refresh()
        # after the journals: see Ledger.of
        ledger = Ledger.of(self._scan, self._leases)
        num_units = len(self._sizes)
        fences = self._leases.fences(num_units)
        rows, errors = ledger.sums(max(num_units, ledger.num_units))
        self.num_done = int(rows.sum())
        return fences, rows[:num_units], errors[:num_units]

    @property
    def workers(self) -> set[str]:
        """Those who hold what is open."""
        return set(self.open.values())

    def all_moved_since(self, moment: float) -> bool:
        """Whether everybody who holds something open was seen alive since then."""
        return all(self._watch.moved_since(worker, moment) for worker in self.workers)

    def _to_retry(self, fences: np.ndarray, failed: np.ndarray) -> Iterator[Takeable]:
        for unit in np.flatnonzero(failed & (fences >= 0) & (fences == self._first_fences)).tolist():
            holder = self._leases.lease(unit, int(fences[unit])).incarnation
            if holder == PUBLISHED_HOLDER:
                # its rows are in a shard that stays as it is
                continue
            liveness, record = (Liveness.dead, None) if holder is None else self._watch.look(holder)
            at_work = record is not None and unit in dict(record.held)
            if liveness is Liveness.dead or not at_work:
                yield Takeable(unit, int(fences[unit]))
            elif holder is not None:
                # with it, while it lives; if it is found dead, its errors are this worker's
                self.open[unit] = holder

    def _to_steal(
        self, fences: np.ndarray, records: dict[str, tuple[Liveness, WorkerRecord | None]]
    ) -> Iterator[Takeable]:
        unstarted: dict[str, list[int]] = {}
        for holder, (_, record) in records.items():
            held = () if record is None else record.held
            units = [unit for unit, started in held if not started and self.open.get(unit) == holder]
            # what this worker held before was taken from it for a reason: no to and fro
            unstarted[holder] = [unit for unit in units if not self._had(unit, int(fences[unit]))]
        unit = choose_steal(unstarted)
        if unit is not None:
            yield Takeable(unit, int(fences[unit]))

    def _had(self, unit: int, fence: int) -> bool:
        return self._incarnation in self._leases.chain(unit, fence).incarnations
