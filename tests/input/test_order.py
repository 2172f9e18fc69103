"""Ordinals and row keys: a bijection that depends on the input and the settings alone."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.input.order import RowOrder
from pipeline.input.source import Block


def blocks_of(files: list[list[int]], whole: frozenset[int] = frozenset()) -> list[Block]:
    """Blocks from the row counts of each file's blocks; files in `whole` cannot be seeked into."""
    blocks = []
    for number, sizes in enumerate(files):
        first_row = 0
        for place, size in enumerate(sizes):
            blocks.append(Block(number, first_row, size, None if number in whole else place))
            first_row += size
    return blocks


def keys_of(order: RowOrder) -> list[tuple[int, int]]:
    files, rows = order.keys(0, order.num_rows)
    return list(zip(files.tolist(), rows.tolist(), strict=True))


FILES = st.lists(st.lists(st.integers(1, 40), max_size=4), max_size=5)
SEEDS = st.none() | st.integers(-3, 2**70)


@given(FILES, st.integers(0, 60), st.none() | st.integers(0, 150), SEEDS)
@settings(max_examples=150, deadline=None)
def test_keys_are_the_rows_after_skip_and_limit_each_once(files, skip, limit, seed) -> None:
    order = RowOrder(blocks_of(files), skip, limit, seed)
    in_file_order = [(number, row) for number, sizes in enumerate(files) for row in range(sum(sizes))]
    expected = in_file_order[skip:] if limit is None else in_file_order[skip : skip + limit]

    keys = keys_of(order)
    assert order.num_rows == len(expected)
    assert sorted(keys) == expected
    if seed is None:
        assert keys == expected

    files_, rows = order.keys(0, order.num_rows)
    assert (files_.dtype, rows.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(order.ordinals(files_, rows), np.arange(order.num_rows))


@given(FILES, SEEDS, st.data())
@settings(max_examples=100, deadline=None)
def test_a_part_equals_the_same_part_of_the_whole(files, seed, data) -> None:
    order = RowOrder(blocks_of(files), 3, 200, seed)
    start = data.draw(st.integers(0, order.num_rows))
    stop = data.draw(st.integers(start, order.num_rows))
    part_files, part_rows = order.keys(start, stop)
    assert list(zip(part_files.tolist(), part_rows.tolist(), strict=True)) == keys_of(order)[start:stop]

    from_segments = []
    ordinal = start
    for segment in order.segments(start, stop):
        assert segment.ordinal == ordinal
        ordinal += len(segment.offsets)
        block = segment.block
        assert all(0 <= offset < block.num_rows for offset in segment.offsets)
        from_segments += [(block.file, block.first_row + int(offset)) for offset in segment.offsets]
    assert from_segments == keys_of(order)[start:stop]


@given(FILES, st.frozensets(st.integers(0, 4)), st.integers(1, 25), SEEDS)
@settings(max_examples=150, deadline=None)
def test_units_cover_every_ordinal_once_in_order(files, whole, unit_rows, seed) -> None:
    order = RowOrder(blocks_of(files, whole), 2, 300, seed)
    units = order.units(unit_rows)
    covered: list[int] = []
    for number, unit in enumerate(units):
        assert unit.number == number and unit == units[number]
        assert unit.stop > unit.start
        covered += range(unit.start, unit.stop)
        assert units.numbers(np.arange(unit.start, unit.stop)).tolist() == [number] * (unit.stop - unit.start)
    assert covered == list(range(order.num_rows))
    assert len(units) == len(list(units))
    if not whole:
        assert [unit.start for unit in units] == list(range(0, order.num_rows, unit_rows))


def test_a_file_that_cannot_be_seeked_is_one_unit() -> None:
    order = RowOrder(blocks_of([[10, 10], [35], [4], [10]], whole=frozenset({1, 2})))
    assert [(unit.start, unit.stop) for unit in order.units(15)] == [
        (0, 15),
        (15, 20),
        (20, 55),
        (55, 59),
        (59, 69),
    ]


def test_units_by_slice_and_from_the_end() -> None:
    units = RowOrder(blocks_of([[25]])).units(10)
    assert units[-1] == (2, 20, 25)
    assert units[1:] == [(1, 10, 20), (2, 20, 25)]
    with pytest.raises(IndexError):
        units[3]


def test_no_rows_no_units() -> None:
    for blocks in ([], blocks_of([[5]])):
        order = RowOrder(blocks, skip=5, shuffle_seed=1)
        assert order.num_rows == 0 and len(order.units(10)) == 0 and list(order.segments(0, 0)) == []
        assert len(order.keys(0, 0)[0]) == 0
        assert not order.contains(np.array([0]), np.array([0])).any()


def test_shuffle_keeps_the_rows_of_a_block_together() -> None:
    files = [[50, 50], [50], [30, 20]]
    keys = keys_of(RowOrder(blocks_of(files), shuffle_seed=7))
    starts = np.cumsum([0, 50, 50, 50, 30, 20])
    flat = [sum(sum(sizes) for sizes in files[:file]) + row for file, row in keys]
    block = np.searchsorted(starts, flat, side="right")
    changes = np.flatnonzero(np.diff(block))
    assert len(changes) == 4  # five blocks, each one run
    assert flat != sorted(flat)
    assert any(np.diff(block)[change] < 0 for change in changes)  # blocks moved as well


def test_the_seed_decides_the_order_for_ever() -> None:
    blocks = blocks_of([[6, 5]])
    assert keys_of(RowOrder(blocks, shuffle_seed=1)) == keys_of(RowOrder(blocks, shuffle_seed=1))
    assert keys_of(RowOrder(blocks, shuffle_seed=1)) != keys_of(RowOrder(blocks, shuffle_seed=2))
    # Written down: a job that is resumed with a later version must find its rows where they were.
    assert [row for _, row in keys_of(RowOrder(blocks, shuffle_seed=0))] == [
        *[2, 0, 4, 3, 5, 1],
        *[7, 6, 10, 8, 9],
    ]


@pytest.mark.parametrize("size", [5, 16, 37])
def test_every_row_is_equally_likely_in_every_place(size: int) -> None:
    seeds = 3000
    counts = np.zeros((size, size))
    for seed in range(seeds):
        order = RowOrder([Block(0, 0, size, 0)], shuffle_seed=seed)
        counts[np.arange(size), order.keys(0, size)[1]] += 1
    expected = seeds / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # Of (size-1)^2 degrees of freedom: mean that, variance twice that; six deviations allow no bias.
    freedom = (size - 1) ** 2
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom)


def test_a_foreign_row_is_refused_by_name() -> None:
    order = RowOrder(blocks_of([[10], [10]]), skip=2, limit=10, shuffle_seed=3)
    files, rows = np.array([0, 0, 1, 1, 2, 0, -1]), np.array([1, 2, 1, 2, 0, 999, 3])
    assert order.contains(files, rows).tolist() == [False, True, True, False, False, False, False]
    with pytest.raises(ValueError, match="row 2 of file 1"):
        order.ordinals(np.array([0, 1]), np.array([2, 2]))


def test_a_hundred_million_rows_cost_what_their_blocks_cost() -> None:
    blocks = blocks_of([[10_000] * 100] * 100)
    tracemalloc.start()
    begun = time.perf_counter()
    order = RowOrder(blocks, 5, 99_000_000, shuffle_seed=11)
    units = order.units(1000)
    assert (len(units), order.num_rows) == (99_000, 99_000_000)
    unit = units[len(units) // 2]
    files, rows = order.keys(unit.start, unit.stop)
    assert len(set(zip(files.tolist(), rows.tolist(), strict=True))) == 1000
    assert order.ordinals(files, rows).tolist() == list(range(unit.start, unit.stop))
    seconds = time.perf_counter() - begun
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 2**20
    assert seconds < 1.0  # some 0.05 s; a table of all rows would take several


def test_one_huge_block_is_never_permuted_as_a_whole() -> None:
    order = RowOrder([Block(0, 0, 10**11, 0)], shuffle_seed=5)
    rows = order.keys(7_000, 8_000)[1]
    assert len(set(rows.tolist())) == 1000 and rows.max() > 10**10
    assert order.ordinals(np.zeros(1000), rows).tolist() == list(range(7_000, 8_000))
