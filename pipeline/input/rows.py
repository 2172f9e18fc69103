"""Rows in ordinal order, each a place in an Arrow batch; nothing becomes a Python object unasked.

Knows: how to read what an order wants from a source, each block once, holding little.
Refuses to know: formats, prompts, which rows are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.input.order import RowOrder, Segment
from pipeline.input.source import Source
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
    """The rows of the ordinals in `wanted` (ordinals or ranges of them, ascending, pulled lazily).

    Blocks in which nothing is wanted are not opened; the others once. In file order one batch is
    held at a time; shuffled, the wanted rows of one block.
    """
    segments = (part for start, stop in _ranges(wanted) for part in order.segments(start, stop))
    for _, of_block in groupby(segments, key=lambda segment: segment.number):
        if order.shuffled:
            yield from _gathered(source, list(of_block), columns)
        else:
            yield from _streamed(source, of_block, columns)


def _ranges(wanted: Iterable[int | range]) -> Iterator[tuple[int, int]]:
    """`wanted` as (start, stop), neighbours joined."""
    start = stop = 0
    for one in wanted:
        begin, end = (one.start, one.stop) if isinstance(one, range) else (int(one), int(one) + 1)
        assert not isinstance(one, range) or one.step == 1, one
        if begin >= end:
            continue
        assert begin >= stop, f"ordinal {begin} is wanted after {stop - 1}"
        if begin > stop and stop > start:
            yield start, stop
            start = begin
        elif stop == start:
            start = begin
        stop = end
    if stop > start:
        yield start, stop


def _streamed(source: Source, segments: Iterator[Segment], columns: Sequence[str]) -> Iterator[Row]:
    """Rows of one block in file order: forward through its batches, one held at a time."""
    batches: Iterator[pa.RecordBatch] | None = None
    batch: pa.RecordBatch | None = None
    begin = end = 0  # the offsets that `batch` holds
    for segment in segments:
        block = segment.block
        if batches is None:
            batches = source.read(block, columns)
        for ordinal, offset in enumerate(segment.offsets, segment.ordinal):
            while offset >= end:
                batch = next(batches, None)
                if batch is None:
                    raise ValueError(
                        f"file {block.file} of the input ends {offset - end + 1} or more rows early: it had "
                        f"{block.num_rows} rows from row {block.first_row} on when it was indexed; restore it"
                    )
                begin, end = end, end + batch.num_rows
            yield Row(ordinal, RowKey(block.file, block.first_row + offset), batch, offset - begin)


def _gathered(source: Source, segments: list[Segment], columns: Sequence[str]) -> Iterator[Row]:
    """Rows of one block in any order: one pass over its batches keeps what is wanted of each."""
    block = segments[0].block
    offsets = np.concatenate([np.asarray(segment.offsets) for segment in segments])
    by_offset = np.argsort(offsets)
    ascending = offsets[by_offset]
    kept: list[pa.RecordBatch] = []
    # Of each wanted row: which kept batch has it, and where.
    number = np.empty(len(offsets), np.int64)
    place = np.empty(len(offsets), np.int64)
    begin = taken = 0
    for batch in source.read(block, columns):
        stop = int(np.searchsorted(ascending, begin + batch.num_rows))
        if stop > taken:
            rows = by_offset[taken:stop]
            number[rows], place[rows] = len(kept), np.arange(stop - taken)
            kept.append(_take(batch, ascending[taken:stop] - begin))
        begin, taken = begin + batch.num_rows, stop
    row = 0
    for segment in segments:
        for ordinal, offset in enumerate(segment.offsets, segment.ordinal):
            key = RowKey(block.file, block.first_row + int(offset))
            yield Row(ordinal, key, kept[number[row]], int(place[row]))
            row += 1


def _take(batch: pa.RecordBatch, rows: np.ndarray) -> pa.RecordBatch:
    # A batch without columns has nothing to take from, and all its rows are alike.
    if len(rows) == batch.num_rows or not batch.num_columns:
        return batch
    return batch.take(pa.array(rows))
