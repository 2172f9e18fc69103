"""What was published while the job runs: finished ranges of units, as shards that stay as they are.

    published/sharding.json           how all of it is cut, settled by whoever came first
    published/F-L.json                units F to L: their shards, hashes, and what was in which part
    published/F-L.H.00000.arrow       a shard of it; H stands for the dataset
    published/deleted/PART.json       that a part was deleted, and which ranges hold its rows now

Knows: these files, and where in the shards a unit's rows lie. Refuses to know: when a range may be
published, what its rows should be. Records are created once and never change.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from pipeline.input.order import Unit
from pipeline.output.dataset import DatasetFormat, ReadyPiece, Sharding
from pipeline.output.layout import PUBLISHED
from pipeline.output.ranges import UnitRange
from pipeline.output.shards import ARROW, BATCH_ROWS, Shard
from pipeline.store import Store

_DELETED = "deleted"
_SUFFIX = ".json"
_SHARDING = f"sharding{_SUFFIX}"
_Record = TypeVar("_Record")


class BatchRef(NamedTuple):
    """Where a batch of a published shard lies."""

    path: Path
    start: int
    stop: int
    rows: int


@dataclass(frozen=True)
class PublishedRange:
    """A finished range: its units' rows are in these shards, for good.

    start: ordinal of its first row. schema: hash of the shards' schema. shards: by form. parts: what each
    part gave, as the fields of a Tally.
    """

    units: UnitRange
    start: int
    sharding: Sharding
    schema: str
    shards: Mapping[str, tuple[Shard, ...]]
    parts: Mapping[str, Mapping[str, int]]

    @property
    def num_rows(self) -> int:
        return sum(shard.rows for shard in self.shards[ARROW])

    def encode(self) -> bytes:
        total = {key: sum(of_part[key] for of_part in self.parts.values()) for key in _keys(self.parts)}
        fields = {**dataclasses.asdict(self), "units": list(self.units), "total": total}
        return (json.dumps(fields, sort_keys=True) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> PublishedRange:
        """Raises ValueError if the data are no record of a range."""
        try:
            fields = json.loads(data)
            shards = {form: tuple(_shard(shard) for shard in of) for form, of in fields["shards"].items()}
            return cls(
                units=UnitRange(*(int(unit) for unit in fields["units"])),
                start=int(fields["start"]),
                sharding=_sharding(fields["sharding"]),
                schema=str(fields["schema"]),
                shards={ARROW: shards[ARROW], **shards},
                parts={str(name): dict(tally) for name, tally in fields["parts"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"is no published range ({error!r})") from error

    def piece(self, job: Path) -> ReadyPiece:
        """Its files as they go into a dataset."""
        folder = job / PUBLISHED
        return ReadyPiece({form: [(folder / s.name, s) for s in of] for form, of in self.shards.items()})

    def batches(self, job: Path) -> list[BatchRef]:
        """Of its Arrow shards, in the order of the rows: BATCH_ROWS rows each, the last fewer."""
        refs, left = [], self.num_rows
        for shard in self.shards[ARROW]:
            for start, stop in zip(shard.ends[:-1], shard.ends[1:], strict=True):
                refs.append(BatchRef(job / PUBLISHED / shard.name, start, stop, min(left, BATCH_ROWS)))
                left -= refs[-1].rows
        return refs


def _keys(parts: Mapping[str, Mapping[str, int]]) -> list[str]:
    return sorted({key for of_part in parts.values() for key in of_part})


def _sharding(fields: dict[str, Any]) -> Sharding:
    return Sharding(**{**fields, "form": DatasetFormat(fields["form"])})


def _shard(fields: dict[str, Any]) -> Shard:
    return Shard(**{**fields, "ends": tuple(int(end) for end in fields["ends"])})


@dataclass(frozen=True)
class DeletedPart:
    """That a part is no longer there. size, sha256: of its committed bytes. ranges: what holds its rows."""

    part: str
    size: int
    sha256: str
    ranges: tuple[UnitRange, ...]

    def encode(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self), sort_keys=True) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> DeletedPart:
        """Raises ValueError if the data are no such record."""
        try:
            fields = json.loads(data)
            ranges = tuple(UnitRange(int(first), int(last)) for first, last in fields["ranges"])
            return cls(str(fields["part"]), int(fields["size"]), str(fields["sha256"]), ranges)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"is no record of a deleted part ({error!r})") from error


def range_path(job: Path, units: UnitRange) -> Path:
    return job / PUBLISHED / f"{units.first:08d}-{units.last:08d}{_SUFFIX}"


def deleted_path(job: Path, part: str) -> Path:
    return job / PUBLISHED / _DELETED / f"{part}{_SUFFIX}"


@dataclass(frozen=True)
class Published:
    """All that is published of a job, at one moment. deleted: by part. sharding: None if nothing is."""

    job: Path
    ranges: Mapping[UnitRange, PublishedRange]
    deleted: Mapping[str, DeletedPart]
    sharding: Sharding | None

    @classmethod
    def read(cls, store: Store, job: Path) -> Published:
        """Raises ValueError, naming the file, if a record is damaged."""
        # first: a part is deleted after the range that holds its rows was recorded
        deleted: dict[str, DeletedPart] = {}
        for path in _records(store, job / PUBLISHED / _DELETED):
            gone = _decoded(store, path, DeletedPart.decode)
            deleted[gone.part] = gone
        ranges: dict[UnitRange, PublishedRange] = {}
        for path in _records(store, job / PUBLISHED):
            if path.name == _SHARDING:
                continue
            found = _decoded(store, path, PublishedRange.decode)
            if path != range_path(job, found.units):
                raise ValueError(f"{path} speaks of units {found.units.first} to {found.units.last}")
            ranges[found.units] = found
        for gone in deleted.values():
            for units in gone.ranges:
                if units not in ranges:
                    raise ValueError(
                        f"{range_path(job, units)} is missing, and part {gone.part} was deleted: restore it"
                    )
        return cls(job, ranges, deleted, settled_sharding(store, job))

    def mask(self, num_units: int) -> np.ndarray:
        """bool [num_units]: which units are published."""
        return _mask(self.ranges, num_units)

    def sharded(self) -> ShardedUnits:
        """Those whose rows can no longer be read from parts."""
        units = {units for gone in self.deleted.values() for units in gone.ranges}
        return ShardedUnits(self.job, [self.ranges[one] for one in sorted(units)])


class ShardedUnits:
    """Units whose rows are read from shards, since a part that held some of them is gone."""

    def __init__(self, job: Path, ranges: Sequence[PublishedRange]) -> None:
        self.ranges = ranges
        self._job = job
        self._firsts = [one.units.first for one in ranges]
        self._batches: tuple[int, list[BatchRef]] | None = None

    def mask(self, num_units: int) -> np.ndarray:
        """bool [num_units]: which they are."""
        return _mask([one.units for one in self.ranges], num_units)

    def batches(self, unit: Unit, samples: int) -> list[BatchRef] | None:
        """The batches that hold the unit's rows; None if these are to be read from parts."""
        place = int(np.searchsorted(self._firsts, unit.number, side="right")) - 1
        if place < 0 or unit.number > self.ranges[place].units.last:
            return None
        if self._batches is None or self._batches[0] != place:
            # units are asked for in turn
            self._batches = place, self.ranges[place].batches(self._job)
        begin = (unit.start - self.ranges[place].start) * samples
        end = (unit.stop - self.ranges[place].start) * samples
        return self._batches[1][begin // BATCH_ROWS : -(-end // BATCH_ROWS)]


def _mask(ranges: Iterable[UnitRange], num_units: int) -> np.ndarray:
    mask = np.zeros(num_units, bool)
    for units in ranges:
        mask[units.first : units.last + 1] = True
    return mask


def _records(store: Store, folder: Path) -> list[Path]:
    return [folder / name for name in sorted(store.names(folder)) if name.endswith(_SUFFIX)]


def _decoded(store: Store, path: Path, decode: Callable[[bytes], _Record]) -> _Record:
    try:
        return decode(store.read(path))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): restore the file") from error


def settled_sharding(store: Store, job: Path) -> Sharding | None:
    """How what is published of a job is cut; None if nobody published yet. Raises ValueError if damaged."""
    path = job / PUBLISHED / _SHARDING
    return _decoded(store, path, _decode_sharding) if store.exists(path) else None


def settle_sharding(store: Store, job: Path, wanted: Sharding) -> None:
    """Makes it the way in which all of the job is cut. Raises ValueError if another one is settled."""
    data = json.dumps(dataclasses.asdict(wanted), sort_keys=True) + "\n"
    if store.create_new(job / PUBLISHED / _SHARDING, data.encode()):
        return
    settled = settled_sharding(store, job)
    assert settled is not None
    if settled != wanted:
        raise ValueError(
            f"{job / PUBLISHED} holds ranges cut otherwise: {settled.options()}, not {wanted.options()}. "
            "Leave these options out to go on with it"
        )


def _decode_sharding(data: bytes) -> Sharding:
    try:
        return _sharding(json.loads(data))
    except (KeyError, TypeError) as error:
        raise ValueError(f"is no sharding ({error!r})") from error
