"""Rows in ordinal order: each block opened once, nothing unwanted held or opened."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.input.jsonl import JsonlFiles
from pipeline.input.order import RowOrder
from pipeline.input.rows import read_rows
from pipeline.input.source import Block, InputIndex
from pipeline.request import RowKey


class FakeSource:
    """Rows that say which they are; notes the blocks opened and the batches made."""

    def __init__(self, sizes: list[int], rows_per_batch: int = 7):
        self.blocks = [Block(number // 2, 0, size, number) for number, size in enumerate(sizes)]
        for number in range(1, len(sizes), 2):
            self.blocks[number] = Block(number // 2, sizes[number - 1], sizes[number], number)
        self.rows_per_batch = rows_per_batch
        self.opened: list[int | None] = []
        self.batches = 0

    def scan(self) -> InputIndex:
        raise NotImplementedError

    def check(self, index: InputIndex) -> None:
        raise NotImplementedError

    def read(self, block: Block, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        self.opened.append(block.locator)
        for start in range(0, block.num_rows, self.rows_per_batch):
            self.batches += 1
            rows = np.arange(start, min(block.num_rows, start + self.rows_per_batch)) + block.first_row
            columns_ = {"file": pa.array(np.full(len(rows), block.file)), "row": pa.array(rows)}
            yield pa.record_batch(columns_).select(list(columns))


COLUMNS = ["file", "row"]


@given(
    st.lists(st.integers(1, 30), max_size=6),
    st.none() | st.integers(0, 9),
    st.integers(0, 20),
    st.none() | st.integers(0, 90),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_exactly_the_wanted_rows_in_order_and_each_block_once(sizes, seed, skip, limit, data) -> None:
    source = FakeSource(sizes)
    order = RowOrder(source.blocks, skip, limit, seed)
    wanted = sorted(data.draw(st.sets(st.integers(0, max(0, order.num_rows - 1))))) if order.num_rows else []
    as_ranges = data.draw(st.booleans())
    asked: list[int | range] = [range(one, one + 1) for one in wanted] if as_ranges else list(wanted)

    rows = list(read_rows(source, order, iter(asked), COLUMNS))
    assert [row.ordinal for row in rows] == wanted
    files, numbers = order.keys(0, order.num_rows)
    for row in rows:
        assert row.key == RowKey(int(files[row.ordinal]), int(numbers[row.ordinal]))
        assert type(row.key.row) is int and type(row.ordinal) is int
        assert row.values(COLUMNS) == {"file": row.key.file, "row": row.key.row}
    assert len(source.opened) == len(set(source.opened))
    touched = {segment.block.locator for one in wanted for segment in order.segments(one, one + 1)}
    assert set(source.opened) == touched


@pytest.mark.parametrize("seed", [None, 4])
def test_a_range_equals_its_ordinals(seed: int | None) -> None:
    source = FakeSource([20, 30, 10])
    order = RowOrder(source.blocks, shuffle_seed=seed)
    ranges = [range(0, 5), range(5, 5), range(5, 9), range(30, 60)]
    by_range = [row.key for row in read_rows(source, order, ranges, COLUMNS)]
    by_ordinal = [row.key for row in read_rows(source, order, [*range(9), *range(30, 60)], COLUMNS)]
    assert by_range == by_ordinal and len(by_range) == 39


def test_rows_without_columns_are_still_rows() -> None:
    for seed in (None, 1):
        source = FakeSource([20, 30])
        order = RowOrder(source.blocks, shuffle_seed=seed)
        assert [row.ordinal for row in read_rows(source, order, [range(50)], [])] == list(range(50))


def test_interrupted_three_times_nothing_is_lost_and_nothing_twice() -> None:
    """Elsewhere a resumed stream skipped 800 rows, and a shuffled one lost 61 of 1,000."""
    for seed in (None, 12):
        source = FakeSource([500] * 10)
        order = RowOrder(source.blocks, shuffle_seed=seed)
        seen: list[RowKey] = []
        for start, stop in ((0, 100), (100, 300), (300, 5000)):
            rows = read_rows(source, order, [range(start, 5000)], COLUMNS)
            seen += [next(rows).key for _ in range(stop - start)]
        assert len(seen) == len(set(seen)) == 5000


def test_what_is_wanted_is_pulled_only_as_far_as_needed() -> None:
    pulled: list[int] = []

    def wanted() -> Iterator[int]:
        for ordinal in range(0, 10_000, 3):
            pulled.append(ordinal)
            yield ordinal

    source = FakeSource([10_000], rows_per_batch=100)
    rows = read_rows(source, RowOrder(source.blocks), wanted(), COLUMNS)
    for _ in range(5):
        next(rows)
    assert len(pulled) < 10 and source.batches == 1


def test_reading_stops_behind_the_last_wanted_row() -> None:
    source = FakeSource([10_000], rows_per_batch=100)
    assert len(list(read_rows(source, RowOrder(source.blocks), [range(150, 250)], COLUMNS))) == 100
    assert source.batches == 3


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.none() | st.integers(0, 9), st.data())
@settings(max_examples=200, deadline=None)
def test_ranges_in_any_order_give_each_row_where_it_was_asked_for(sizes, seed, data) -> None:
    source = FakeSource(sizes)
    order = RowOrder(source.blocks, shuffle_seed=seed)
    units = list(order.units(data.draw(st.integers(1, 9))))
    asked = [range(unit.start, unit.stop) for unit in data.draw(st.permutations(units))]
    rows = list(read_rows(source, order, iter(asked), COLUMNS))
    assert [row.ordinal for row in rows] == [ordinal for one in asked for ordinal in one]
    files, numbers = order.keys(0, order.num_rows)
    for row in rows:
        key = RowKey(int(files[row.ordinal]), int(numbers[row.ordinal]))
        assert row.key == key and row.values(COLUMNS) == {"file": key.file, "row": key.row}


@pytest.mark.parametrize("seed", [None, 3])
def test_neighbouring_ranges_decode_their_block_once(seed: int | None) -> None:
    source = FakeSource([40, 40])
    order = RowOrder(source.blocks, shuffle_seed=seed)
    ranges = [range(start, start + 10) for start in (40, 50, 60, 70, 0, 10, 20, 30)]
    assert len(list(read_rows(source, order, ranges, COLUMNS))) == 80
    assert len(source.opened) == 2


def test_ranges_beyond_the_input_are_our_own_mistake() -> None:
    source = FakeSource([10])
    with pytest.raises(AssertionError):
        list(read_rows(source, RowOrder(source.blocks), [range(5, 11)], COLUMNS))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_block_that_lost_rows_is_named(seed: int | None) -> None:
    source = FakeSource([10])
    order = RowOrder([Block(0, 0, 12, 0)], shuffle_seed=seed)
    with pytest.raises(ValueError, match="file 0 of the input .* restore it"):
        list(read_rows(_Shorter(source), order, [range(12)], COLUMNS))


class _Shorter:
    """Gives the rows of the first block, whichever is asked for."""

    def __init__(self, source: FakeSource) -> None:
        self.source = source

    def read(self, block: Block, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return self.source.read(self.source.blocks[0], columns)


@pytest.mark.parametrize("seed", [None, 3])
def test_memory_is_flat_over_many_rows(seed: int | None, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("w") as out:
        for number in range(60_000):
            out.write(json.dumps({"id": number, "text": f"{number} " * 20}) + "\n")
    source = JsonlFiles(str(path))
    order = RowOrder(source.scan().blocks, shuffle_seed=seed)
    peaks = []
    arrow = pa.total_allocated_bytes()
    tracemalloc.start()
    seen = np.zeros(order.num_rows, bool)
    for row in read_rows(source, order, [range(order.num_rows)], ["id", "text"]):
        seen[row.key.row] = True
        if row.ordinal % 5000 == 0:
            peaks.append(tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - arrow)
    tracemalloc.stop()
    assert seen.all()
    assert peaks[-1] < peaks[2] + 2**20
    assert peaks[-1] < 12 * 2**20
