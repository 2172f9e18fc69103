"""Rows by ordinal, each a place in an Arrow batch; nothing becomes a Python object unasked.

Knows: how to read what an order wants from a source, no block twice in a row, holding little.
Refuses to know: formats, prompts, which rows are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.input.order import RowOrder, Segment
from pipeline.input.source import Block, Source
from pipeline.request import RowKey


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One input row: row `index` of `batch`."""

    ordinal: int
    key: RowKey
    batch: pa.RecordBatch
    index: int

    def value(self, column: str) -> Any:
        """The row's value in that column, as Python has it. KeyError if the column was not read."""
        return self.batch.column(column)[self.index].as_py()

    def values(self, columns: Iterable[str]) -> dict[str, Any]:
        return {column: self.value(column) for column in columns}


def read_rows(
    source: Source, order: RowOrder, wanted: Iterable[int | range], columns: Sequence[str]
) -> Iterator[Row]:
    """The rows of the ordinals in `wanted` (ordinals, or ranges of step 1, in any order), pulled lazily."""
    reader = RowReader(source, order, columns)
    for one in wanted:
        yield from reader.rows(one if isinstance(one, range) else range(int(one), int(one) + 1))


class RowReader:
    """Reads ranges of ordinals in the order in which they are asked for.

    Blocks in which nothing is wanted are not opened. What lies ahead in the block that was read last goes
    on from there, so that neighbouring ranges decode it once. In file order one batch is held at a time;
    shuffled, the block that was read last.
    """

    def __init__(self, source: Source, order: RowOrder, columns: Sequence[str]) -> None:
        self._source = source
        self._order = order
        self._columns = columns
        self._number: int | None = None
        self._open: _Forward | _Gathered | None = None

    def rows(self, wanted: range) -> Iterator[Row]:
        """The rows of these ordinals. Raises ValueError if the input has lost rows since it was indexed."""
        assert wanted.step == 1, wanted
        for segment in self._order.segments(wanted.start, max(wanted.start, wanted.stop)):
            yield from self._block(segment).rows(segment)

    def _block(self, segment: Segment) -> _Forward | _Gathered:
        held = self._open
        if held is None or self._number != segment.number or not held.reaches(segment):
            # first let go of the old one: two blocks at once may be too much
            self._open = held = None
            kind = _Gathered if self._order.shuffled else _Forward
            held = self._open = kind(self._source, segment.block, self._columns)
            self._number = segment.number
        return held


class _Forward:
    """One block in file order: forward through its batches, one held at a time."""

    def __init__(self, source: Source, block: Block, columns: Sequence[str]) -> None:
        self._block = block
        self._batches = iter(source.read(block, columns))
        self._batch: pa.RecordBatch | None = None
        self._begin = self._end = 0  # the offsets that the batch holds

    def reaches(self, segment: Segment) -> bool:
        return segment.offsets[0] >= self._begin

    def rows(self, segment: Segment) -> Iterator[Row]:
        for ordinal, offset in enumerate(segment.offsets, segment.ordinal):
            while offset >= self._end:
                self._advance(offset)
            assert self._batch is not None
            key = RowKey(self._block.file, self._block.first_row + offset)
            yield Row(ordinal, key, self._batch, offset - self._begin)

    def _advance(self, offset: int) -> None:
        block = self._block
        self._batch = next(self._batches, None)
        if self._batch is None:
            raise ValueError(
                f"file {block.file} of the input ends {offset - self._end + 1} or more rows early: it had "
                f"{block.num_rows} rows from row {block.first_row} on when it was indexed; restore it"
            )
        self._begin, self._end = self._end, self._end + self._batch.num_rows


class _Gathered:
    """One block in any order: all of its batches are held."""

    def __init__(self, source: Source, block: Block, columns: Sequence[str]) -> None:
        self._block = block
        self._batches = [batch for batch in source.read(block, columns) if batch.num_rows]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])

    def reaches(self, segment: Segment) -> bool:
        return True

    def rows(self, segment: Segment) -> Iterator[Row]:
        block, offsets = self._block, np.asarray(segment.offsets)
        numbers = np.searchsorted(self._ends, offsets, side="right")
        if len(offsets) and numbers.max() >= len(self._batches):
            raise ValueError(
                f"file {block.file} of the input is shorter than the {block.num_rows} rows from row "
                f"{block.first_row} on that it had when it was indexed; restore it"
            )
        for place, (offset, number) in enumerate(zip(offsets.tolist(), numbers.tolist(), strict=True)):
            batch = self._batches[number]
            begin = int(self._ends[number]) - batch.num_rows
            yield Row(
                segment.ordinal + place, RowKey(block.file, block.first_row + offset), batch, offset - begin
            )
