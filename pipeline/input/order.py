"""Which row is the n-th: ordinals to row keys and back, and the units of work. Pure numpy.

Knows: blocks and their sizes, skip, limit, the seed of the shuffle.
Refuses to know: files, columns, filters, workers. Everything here is a function of the input and
the settings alone, costs memory by the block and never by the row, and is equal on every machine
and numpy version (numpy's own generators may change what a seed means).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np

from pipeline.input.source import Block

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 8


class Unit(NamedTuple):
    """A contiguous range of ordinals, start to stop (exclusive): the grain of resume and of sharing."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Segment:
    """Neighbouring ordinals that lie in one block.

    number: the block's place in this order. ordinal: the first one. offsets: the rows within the
    block (0: its first) in the order of the ordinals; a range when rows come in file order.
    """

    number: int
    block: Block
    ordinal: int
    offsets: range | np.ndarray


class RowOrder:
    """Ordinals 0..num_rows-1 and the rows they stand for.

    `skip` and `limit` count rows in file order. With a `shuffle_seed` the blocks that remain come in
    a permuted order, and so do the rows within each, so that reading stays local.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        skip: int = 0,
        limit: int | None = None,
        shuffle_seed: int | None = None,
    ):
        self.shuffled = shuffle_seed is not None
        self._blocks = blocks
        count = len(blocks)
        files = np.fromiter((block.file for block in blocks), np.int64, count)
        rows = np.fromiter((block.first_row for block in blocks), np.int64, count)
        sizes = np.fromiter((block.num_rows for block in blocks), np.int64, count)
        ends = np.cumsum(sizes)
        begins = ends - sizes
        total = int(ends[-1]) if count else 0
        last = total if limit is None else min(total, skip + limit)
        first = np.clip(skip - begins, 0, sizes)
        stop = np.clip(last - begins, first, sizes)

        kept = np.flatnonzero(stop > first)
        seed = _mix(np.array([(shuffle_seed or 0) % 2**64], np.uint64))
        if self.shuffled:
            kept = kept[_permute(np.arange(len(kept)), np.array([len(kept)]), seed)]
        self._block = kept
        self._whole = np.fromiter((block.locator is None for block in blocks), np.bool_, count)[kept]
        self._file = files[kept]
        # Of each block: the first row kept, as counted in the block and in the file.
        self._first = first[kept]
        self._row = rows[kept] + self._first
        self._size = (stop - first)[kept]
        self._stop = np.cumsum(self._size)
        self._start = self._stop - self._size
        self._key = _mix(_mix(seed + self._file.astype(np.uint64)) + rows[kept].astype(np.uint64))
        # Blocks by (file, row) as one number, to find the block of a row.
        self._width = int((self._row + self._size).max(initial=0)) + 1
        self._by_key = np.lexsort((self._row, self._file))
        self._keys = (self._file * self._width + self._row)[self._by_key]
        self.num_rows = int(self._stop[-1]) if len(kept) else 0

    def units(self, unit_rows: int) -> Units:
        """The units of this order, computed as they are asked for.

        They hold `unit_rows` rows, the last fewer; a block that can only be read from its file's
        start is a unit of its own, since two workers sharing it would both read all of it.
        """
        whole = self._whole
        begins_span = whole | np.concatenate([[True], whole[:-1]])[: len(whole)]
        spans = np.flatnonzero(begins_span)
        starts = self._start[spans]
        stops = np.append(starts[1:], self.num_rows)[: len(starts)]
        return Units(starts, stops, np.where(whole[spans], stops - starts, unit_rows))

    def keys(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Row keys of the ordinals start..stop: files int32 [stop-start], rows int64 [stop-start]."""
        self._require(start, stop)
        ordinals = np.arange(start, stop, dtype=np.int64)
        number = np.searchsorted(self._stop, ordinals, side="right")
        offsets = ordinals - self._start[number]
        if self.shuffled:
            offsets = _permute(offsets, self._size[number], self._key[number])
        return self._file[number].astype(np.int32), self._row[number] + offsets

    def ordinals(self, files: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The inverse of `keys`: int64, as many as given. Raises ValueError for a foreign row."""
        inside, number = self._locate(files, rows)
        if not inside.all():
            foreign = int(np.flatnonzero(~inside)[0])
            raise ValueError(
                f"row {rows[foreign]} of file {files[foreign]} is not among the rows of this job"
            )
        offsets = np.asarray(rows, np.int64) - self._row[number]
        if self.shuffled:
            offsets = _permute(offsets, self._size[number], self._key[number], backwards=True)
        return self._start[number] + offsets

    def contains(self, files: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Which rows belong to this order: bool, as many as given."""
        return self._locate(files, rows)[0]

    def segments(self, start: int, stop: int) -> Iterator[Segment]:
        """The blocks that hold the ordinals start..stop, in turn, and which of their rows."""
        self._require(start, stop)
        number = int(np.searchsorted(self._stop, start, side="right"))
        while start < stop:
            begin, size = int(self._start[number]), int(self._size[number])
            end = min(stop, begin + size)
            block = self._blocks[int(self._block[number])]
            first = int(self._first[number])
            offsets: range | np.ndarray = range(first + start - begin, first + end - begin)
            if self.shuffled:
                within = np.arange(start - begin, end - begin)
                offsets = first + _permute(
                    within, self._size[number : number + 1], self._key[number : number + 1]
                )
            yield Segment(number, block, start, offsets)
            start, number = end, number + 1

    def _locate(self, files: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the rows belong here, and the block of each (of any, where it does not belong)."""
        files, rows = np.asarray(files, np.int64), np.asarray(rows, np.int64)
        if not self.num_rows:
            return np.zeros(len(files), bool), np.zeros(len(files), np.int64)
        wanted = files * self._width + np.minimum(rows, self._width - 1)
        number = self._by_key[np.maximum(np.searchsorted(self._keys, wanted, side="right") - 1, 0)]
        offsets = rows - self._row[number]
        return (self._file[number] == files) & (offsets >= 0) & (offsets < self._size[number]), number

    def _require(self, start: int, stop: int) -> None:
        assert 0 <= start <= stop <= self.num_rows, f"ordinals {start}..{stop} of {self.num_rows}"


class Units(Sequence[Unit]):
    """The units of an order, by number. Spans [B]: start, stop and rows per unit of each."""

    def __init__(self, starts: np.ndarray, stops: np.ndarray, steps: np.ndarray):
        self._starts, self._stops, self._steps = starts, stops, steps
        self._after = np.cumsum(-(-(stops - starts) // steps))

    def __len__(self) -> int:
        return int(self._after[-1]) if len(self._after) else 0

    @overload
    def __getitem__(self, number: int) -> Unit: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Unit]: ...
    def __getitem__(self, number: int | slice) -> Unit | Sequence[Unit]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        span = int(np.searchsorted(self._after, number, side="right"))
        before = int(self._after[span - 1]) if span else 0
        start = int(self._starts[span]) + (number - before) * int(self._steps[span])
        return Unit(number, start, min(start + int(self._steps[span]), int(self._stops[span])))

    def starts(self) -> np.ndarray:
        """The first ordinal of each unit, and the end of the last: int64 [len(self) + 1]."""
        spans = zip(self._starts, self._stops, self._steps, strict=True)
        begins = [np.arange(start, stop, step, dtype=np.int64) for start, stop, step in spans]
        return np.concatenate([*begins, [self._stops[-1] if begins else 0]]).astype(np.int64)

    def numbers(self, ordinals: np.ndarray) -> np.ndarray:
        """The unit of each ordinal: int64, as many as given."""
        ordinals = np.asarray(ordinals, np.int64)
        span = np.searchsorted(self._starts, ordinals, side="right") - 1
        before = np.concatenate([[0], self._after])[span]
        return before + (ordinals - self._starts[span]) // self._steps[span]


def _mix(words: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each word: one step of SplitMix64 (Steele, Lea, Flood: Fast Splittable
    Pseudorandom Number Generators, 2014)."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _permute(places: np.ndarray, sizes: np.ndarray, keys: np.ndarray, backwards: bool = False) -> np.ndarray:
    """places int64 [N], each below its sizes [N], through the permutation named by its keys [N].

    A Feistel network over pairs whose radixes multiply to just over the size; a result outside is
    sent through again until it falls inside (Black, Rogaway: Ciphers with Arbitrary Finite Domains,
    2002). So a row's place is computed alone, whatever the size of its block.
    """
    sizes = np.broadcast_to(sizes, places.shape)
    keys = np.broadcast_to(keys, places.shape)
    result = places.astype(np.int64)
    todo = np.arange(len(places))
    while len(todo):
        result[todo] = _network(result[todo], sizes[todo], keys[todo], backwards)
        todo = todo[result[todo] >= sizes[todo]]
    return result


def _network(places: np.ndarray, sizes: np.ndarray, keys: np.ndarray, backwards: bool) -> np.ndarray:
    rows = np.ceil(np.sqrt(sizes)).astype(np.int64)
    columns = -(-sizes // rows)
    pair = [places // columns, places % columns]
    radixes = [rows.astype(np.uint64), columns.astype(np.uint64)]
    for turn in reversed(range(_ROUNDS)) if backwards else range(_ROUNDS):
        side = turn % 2
        word = _mix(_mix(keys + np.uint64(turn)) + pair[1 - side].astype(np.uint64))
        shift = (word % radixes[side]).astype(np.int64)
        moved = pair[side] - shift if backwards else pair[side] + shift
        pair[side] = moved % radixes[side].astype(np.int64)
    return pair[0] * columns + pair[1]
