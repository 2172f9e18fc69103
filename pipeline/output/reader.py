"""Reading parts back: committed rows only, whatever else a part's file holds.

Knows: how to find a commit's rows in a part (memory-mapped, nothing is copied), and that rows which do not
count are left out. Refuses to know: which those are (`chains.py`, `keys.py`), what the rows should be.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.output.layout import PUBLISHED, part_path
from pipeline.output.ledger import CommitRef, Ledger
from pipeline.output.published import BatchRef, Published, ShardedUnits
from pipeline.store import Store

# Mapped files held at once: far below the usual limit on open files.
_MAX_OPEN = 64


class PartFiles:
    """The parts of a job, opened when needed. `read` gives a commit's rows without copying them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: OrderedDict[Path, tuple[pa.Buffer, pa.Schema]] = OrderedDict()

    def read(self, ref: CommitRef | BatchRef) -> pa.RecordBatch:
        """Raises ValueError naming the file and the remedy if the bytes are no record batch."""
        path = ref.path if isinstance(ref, BatchRef) else self._path(ref.part)
        data, schema = self._file(path)
        if data.size < ref.stop:
            raise damaged(path, f"ends at byte {data.size}, before {ref.stop}")
        try:
            message = pa.ipc.read_message(pa.BufferReader(data.slice(ref.start, ref.stop - ref.start)))
            batch = pa.ipc.read_record_batch(message, schema)
        except (pa.ArrowInvalid, EOFError, OSError) as error:
            raise damaged(path, f"no rows at byte {ref.start} ({error})") from error
        if batch.num_rows != ref.rows:
            what = f"{batch.num_rows} rows at byte {ref.start} where its journal says {ref.rows}"
            raise damaged(path, what)
        return batch

    def schema(self, part: int) -> pa.Schema:
        return self._file(self._path(part))[1]

    def _path(self, part: int) -> Path:
        return part_path(self._ledger.job, self._ledger.parts[part].header.part)

    def _file(self, path: Path) -> tuple[pa.Buffer, pa.Schema]:
        if path not in self._open:
            self._open[path] = _open(self._ledger.store, path)
            if len(self._open) > _MAX_OPEN:
                # batches made from it keep the mapping alive as long as they need it
                self._open.popitem(last=False)
        self._open.move_to_end(path)
        return self._open[path]


def _open(store: Store, path: Path) -> tuple[pa.Buffer, pa.Schema]:
    try:
        data = pa.py_buffer(store.view(path))
        return data, pa.ipc.read_schema(pa.ipc.read_message(pa.BufferReader(data)))
    except FileNotFoundError:
        raise damaged(path, "is missing") from None
    except (pa.ArrowInvalid, EOFError, OSError) as error:
        raise damaged(path, f"does not begin with a schema ({error})") from error


def damaged(path: Path, what: str) -> ValueError:
    if path.parent.name == PUBLISHED:
        return ValueError(f"shard {path} {what}: restore the file")
    return ValueError(
        f"part {path} {what}: restore the file, or delete it and journal/{path.stem}.jsonl to have its rows "
        "generated again"
    )


class CommittedParts:
    """All committed rows of a job that count, in the order of commits; iterate for record batches.

    A row that was generated again, after an error or by a worker that took its unit over, appears once.
    Published rows whose parts were deleted come first, from the shards that hold them.
    """

    def __init__(self, job: Path) -> None:
        self.ledger = Ledger.read(job)
        self._files = PartFiles(self.ledger)
        self._sharded = Published.read(self.ledger.store, job).sharded()
        self._gone = self._sharded.mask(self.ledger.num_units)
        self._again: _RowsAgain | None = None

    @property
    def num_rows(self) -> int:
        return self.ledger.num_results

    @property
    def schema(self) -> pa.Schema:
        if not self.ledger.parts or self._sharded.ranges:
            # imported here, since resuming a job reads its parts
            from pipeline.output.progress import JobDirectory

            return JobDirectory.load(self.ledger.job, self.ledger.store).schema.arrow
        return self._files.schema(0)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        yield from self._rows_of_shards()
        for ref in self.ledger.all_commits():
            units = self.ledger.units_of(ref)
            left = [unit for unit in units if not self._gone[unit]]
            if not any(self.ledger.counts(ref, unit) for unit in left):
                # the part itself may be gone
                continue
            batch = self._files.read(ref)
            again = [unit for unit in units if self._gone[unit] or self._is_again(ref, unit)]
            yield self._rows_again().keep(ref, batch, again) if again else batch

    def to_table(self) -> pa.Table:
        return pa.Table.from_batches(self, schema=self.schema)

    def _rows_of_shards(self) -> Iterator[pa.RecordBatch]:
        for one in self._sharded.ranges:
            for ref in one.batches(self.ledger.job):
                # what shards say of their origin is more than parts do
                yield self._files.read(ref).replace_schema_metadata(self.schema.metadata)

    def _is_again(self, ref: CommitRef, unit: int) -> bool:
        """Whether rows of the unit that this commit holds may be stored elsewhere as well."""
        return not self.ledger.counts(ref, unit) or self.ledger.num_retried(unit) > 0

    def _rows_again(self) -> _RowsAgain:
        if self._again is None:
            self._again = _RowsAgain(self.ledger, self._sharded)
        return self._again


class _RowsAgain:
    """Sorts out which stored rows of a unit count, where some were generated again."""

    def __init__(self, ledger: Ledger, sharded: ShardedUnits) -> None:
        from pipeline.output.progress import JobDirectory
        from pipeline.output.stored import StoredRows

        directory = JobDirectory.load(ledger.job, ledger.store)
        self._units = directory.units
        self._stored = StoredRows(ledger, directory.order, directory.samples)
        self._gone = sharded.mask(ledger.num_units)
        # neighbouring commits mostly speak of the same unit
        self._unit = lru_cache(maxsize=4)(self._stored.unit)

    def keep(self, ref: CommitRef, batch: pa.RecordBatch, units: list[int]) -> pa.RecordBatch:
        """The batch of a commit without the rows of `units` that do not count, or come from shards."""
        current = ~np.isin(self._stored.units_of(batch, self._units), units)
        for number in units:
            if self._gone[number]:
                continue
            stored = self._unit(self._units[number])
            mine = [place for place, other in enumerate(stored.commits) if other == ref]
            current[stored.index[stored.current & np.isin(stored.commit, mine)]] = True
        return batch if current.all() else batch.filter(pa.array(current))


def open_parts(job: str | Path) -> CommittedParts:
    """The committed rows of the job in directory `job`, also while it runs or after it was killed.

    Raises ValueError if a journal or a part is damaged.
    """
    return CommittedParts(Path(job))
