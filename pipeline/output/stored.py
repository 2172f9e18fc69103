"""What of a unit is stored, and where: the parts seen in the order of the input.

Knows: how a unit's rows are found among commits, and which of them count. Resume, `verify` and `finalize`
all look through here, so they cannot disagree. Refuses to know: what the rows should be.

Legend: R = stored rows of the unit in the order in which they count. A slot is a result the unit must have:
(ordinal - unit.start) * samples + sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.input.order import RowOrder, Unit, Units
from pipeline.output.keys import last_of_each, row_codes
from pipeline.output.ledger import CommitRef, Ledger
from pipeline.output.published import BatchRef, ShardedUnits
from pipeline.output.reader import PartFiles
from pipeline.request import FinishReason


@dataclass(frozen=True)
class StoredUnit:
    """Where the rows of a unit lie.

    commits: those whose rows of the unit count, or batches of shards, if these hold them now. slots, commit,
    index int64 [R]: which result a row is, in which of `commits`, at which row. failed bool [R]: ended as
    error. fence int64 [R]: of the lease under which the row counts. current bool [R]: the row counts.
    num_slots: results the unit must have.
    """

    unit: Unit
    num_slots: int
    commits: Sequence[CommitRef | BatchRef]
    slots: np.ndarray
    commit: np.ndarray
    index: np.ndarray
    failed: np.ndarray
    fence: np.ndarray
    current: np.ndarray

    def done(self, count_errors: bool = True) -> np.ndarray:
        """bool [num_slots]: which results are there."""
        done = np.zeros(self.num_slots, bool)
        counted = self.current if count_errors else self.current & ~self.failed
        done[self.slots[counted]] = True
        return done

    def ordered(self) -> np.ndarray:
        """int64, positions in R of the rows that count, by slot."""
        positions = np.flatnonzero(self.current)
        return positions[np.argsort(self.slots[positions], kind="stable")]

    def doubled(self) -> np.ndarray:
        """int64, positions in R of rows whose result is there again, other than as a retried error."""
        order = np.lexsort((np.arange(len(self.slots)), self.slots))
        first, second = order[:-1], order[1:]
        again = self.slots[first] == self.slots[second]
        retried = self.failed[first] & (self.fence[first] < self.fence[second])
        return second[again & ~retried]


class StoredRows:
    """The stored rows of a job by unit."""

    def __init__(
        self, ledger: Ledger, order: RowOrder, samples: int, sharded: ShardedUnits | None = None
    ) -> None:
        """sharded: units whose parts are gone; None if there are none, or none of them will be asked for."""
        self.ledger = ledger
        self.sharded = sharded
        self.files = PartFiles(ledger)
        self._order = order
        self._samples = samples

    def unit(self, unit: Unit) -> StoredUnit:
        """Reads the key columns of the commits that name the unit, nothing else."""
        codes = row_codes(*self._order.keys(unit.start, unit.stop))
        by_code = np.argsort(codes)
        codes = codes[by_code]
        shards = None if self.sharded is None else self.sharded.batches(unit, self._samples)
        commits: Sequence[CommitRef | BatchRef] = (
            self.ledger.commits(unit.number) if shards is None else shards
        )
        found = [self._find(number, ref, codes, by_code) for number, ref in enumerate(commits)]
        columns = [np.concatenate(column) for column in zip(*found, strict=True)] if found else _NOTHING
        slots, commit, index, failed = columns
        fences = self.ledger.fences(unit.number) if shards is None else [0] * len(shards)
        fence = np.array(fences, np.int64)[commit]
        num_slots = len(codes) * self._samples
        return StoredUnit(
            unit, num_slots, commits, slots, commit, index, failed.astype(bool), fence, last_of_each(slots)
        )

    def _find(
        self, number: int, ref: CommitRef | BatchRef, codes: np.ndarray, by_code: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """slots, commit, index, failed of the rows of one commit that are in the unit."""
        batch = self.files.read(ref)
        stored = row_codes(batch.column("file").to_numpy(), batch.column("row").to_numpy())
        sample = batch.column("sample").to_numpy()
        places = np.minimum(np.searchsorted(codes, stored), len(codes) - 1)
        inside = (codes[places] == stored) & (sample >= 0) & (sample < self._samples)
        index = np.flatnonzero(inside)
        slots = by_code[places[inside]] * self._samples + sample[inside]
        failed = pc.equal(batch.column("finish_reason"), FinishReason.ERROR.value)
        failed = failed.to_numpy(zero_copy_only=False)[inside]
        return slots, np.full(len(index), number), index, failed

    def units_of(self, batch: pa.RecordBatch, units: Units) -> np.ndarray:
        """int64 [rows of the batch]: the unit of each."""
        return units.numbers(
            self._order.ordinals(batch.column("file").to_numpy(), batch.column("row").to_numpy())
        )

    def take(self, stored: StoredUnit, positions: np.ndarray) -> pa.Table:
        """The whole rows at `positions` of R (at least one), in that order."""
        owners = stored.commit[positions]
        pieces, places = [], []
        for number in np.unique(owners):
            mine = np.flatnonzero(owners == number)
            batch = self.files.read(stored.commits[number])
            pieces.append(batch.take(pa.array(stored.index[positions[mine]])))
            places.append(mine)
        table = pa.Table.from_batches(pieces)
        if len(pieces) == 1:
            return table
        return table.take(pa.array(np.argsort(np.concatenate(places))))


_NOTHING = [np.empty(0, np.int64) for _ in range(4)]
