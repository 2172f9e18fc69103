"""Reading parts back: committed rows only, whatever else a part's file holds.

Knows: how to find a commit's rows in a part (memory-mapped, nothing is copied), and which rows a later
commit has voided. Refuses to know: the input, the order of rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.output.keys import last_of_each, row_codes
from pipeline.output.layout import part_path
from pipeline.output.ledger import CommitRef, Ledger

# Mapped files held at once: far below the usual limit on open files.
_MAX_OPEN = 64


class PartFiles:
    """The parts of a job, opened when needed. `read` gives a commit's rows without copying them."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: OrderedDict[int, tuple[pa.MemoryMappedFile, pa.Schema]] = OrderedDict()

    def read(self, ref: CommitRef) -> pa.RecordBatch:
        """Raises ValueError naming the part and the remedy if the bytes are no record batch."""
        file, schema = self._file(ref.part)
        name = self._ledger.parts[ref.part].header.part
        if file.size() < ref.stop:
            raise damaged(part_path(self._ledger.job, name), f"ends at byte {file.size()}, before {ref.stop}")
        try:
            file.seek(ref.start)
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
        except (pa.ArrowInvalid, EOFError, OSError) as error:
            raise damaged(
                part_path(self._ledger.job, name), f"no rows at byte {ref.start} ({error})"
            ) from error
        if batch.num_rows != ref.rows:
            what = f"{batch.num_rows} rows at byte {ref.start} where its journal says {ref.rows}"
            raise damaged(part_path(self._ledger.job, name), what)
        return batch

    def schema(self, part: int) -> pa.Schema:
        return self._file(part)[1]

    def _file(self, part: int) -> tuple[pa.MemoryMappedFile, pa.Schema]:
        if part not in self._open:
            path = part_path(self._ledger.job, self._ledger.parts[part].header.part)
            self._open[part] = _open(path)
            if len(self._open) > _MAX_OPEN:
                # batches made from it keep the mapping alive as long as they need it
                self._open.popitem(last=False)
        self._open.move_to_end(part)
        return self._open[part]


def _open(path: Path) -> tuple[pa.MemoryMappedFile, pa.Schema]:
    try:
        file = pa.memory_map(str(path))
        return file, pa.ipc.read_schema(pa.ipc.read_message(file))
    except FileNotFoundError:
        raise damaged(path, "is missing") from None
    except (pa.ArrowInvalid, EOFError, OSError) as error:
        raise damaged(path, f"does not begin with a schema ({error})") from error


def damaged(path: Path, what: str) -> ValueError:
    return ValueError(
        f"part {path} {what}: restore the file, or delete it and journal/{path.stem}.jsonl to have its rows "
        "generated again"
    )


class CommittedParts:
    """All committed rows of a job, in the order of commits; iterate for record batches.

    A row that was generated again after an error appears once, as it ended last.
    """

    def __init__(self, job: Path) -> None:
        self.ledger = Ledger.read(job)
        self._files = PartFiles(self.ledger)

    @property
    def num_rows(self) -> int:
        totals = self.ledger.totals
        return totals.rows - totals.retried

    @property
    def schema(self) -> pa.Schema:
        if not self.ledger.parts:
            # imported here, since resuming a job reads its parts
            from pipeline.output.progress import JobDirectory

            return JobDirectory.load(self.ledger.job).schema.arrow
        return self._files.schema(0)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for ref in self.ledger.all_commits():
            batch = self._files.read(ref)
            current = self._current(ref, batch)
            yield batch if current.all() else batch.filter(pa.array(current))

    def to_table(self) -> pa.Table:
        return pa.Table.from_batches(self, schema=self.schema)

    def _current(self, ref: CommitRef, batch: pa.RecordBatch) -> np.ndarray:
        """bool [R]: which rows of this commit no later one has voided."""
        retried = [unit for unit in self.ledger.units_of(ref) if self.ledger.num_retried(unit)]
        if not retried:
            return np.ones(batch.num_rows, bool)
        related = sorted({other for unit in retried for other in self.ledger.commits(unit)})
        batches = [self._files.read(other) for other in related]
        keys = np.concatenate([_keys(other) for other in batches])
        _, slots = np.unique(keys, axis=0, return_inverse=True)
        start = sum(other.num_rows for other in batches[: related.index(ref)])
        return last_of_each(slots.reshape(-1))[start : start + batch.num_rows]


def _keys(batch: pa.RecordBatch) -> np.ndarray:
    """int64 [R, 2]: row code and sample."""
    codes = row_codes(batch.column("file").to_numpy(), batch.column("row").to_numpy())
    return np.stack([codes, batch.column("sample").to_numpy().astype(np.int64)], axis=1)


def open_parts(job: str | Path) -> CommittedParts:
    """The committed rows of the job in directory `job`, also while it runs or after it was killed.

    Raises ValueError if a journal or a part is damaged.
    """
    return CommittedParts(Path(job))
