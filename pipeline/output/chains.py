"""Who owns a unit, and whose commits count for it: the rule on which exactly once rests.

A unit's leases are a chain of files that are created atomically and never change; each names its holder
under the next higher fence. Only the highest holds the unit. A lease that takes a unit over says where the
holder before it ended: commits up to that cut count, whatever that holder writes later is void. Knows:
leases, how they are stored and what follows from them. Refuses to know: when to take a lease (`cluster`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.output.layout import LEASES, lease_path, part_name
from pipeline.store import Store


class Position(NamedTuple):
    """A commit of an incarnation: the part it lies in, and the byte where it ends. Ordered as they came."""

    seq: int
    offset: int


@dataclass(frozen=True)
class Lease:
    """Ownership of a unit by one incarnation; by nobody (None) if it was given back.

    cut: the last commit of the holder before this one that counts for the unit; None if none does.
    since: the last commit of this holder, had it held the unit before: that one and earlier ones do not
    count under this fence. time: seconds since 1970, for people.
    """

    unit: int
    fence: int
    incarnation: str | None
    cut: Position | None
    since: Position | None
    time: float

    def encode(self) -> bytes:
        fields = {
            "unit": self.unit,
            "fence": self.fence,
            "incarnation": self.incarnation,
            "cut": _plain(self.cut),
            "since": _plain(self.since),
            "time": self.time,
        }
        return (json.dumps(fields) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Lease:
        """Raises ValueError if the data are no lease."""
        try:
            fields = json.loads(data)
            cut, since = _position(fields["cut"]), _position(fields["since"])
            incarnation = fields["incarnation"]
            if not (incarnation is None or isinstance(incarnation, str)):
                raise ValueError(f"{incarnation!r} is no incarnation")
            return cls(
                int(fields["unit"]), int(fields["fence"]), incarnation, cut, since, float(fields["time"])
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"is no lease ({error!r})") from error


def _plain(position: Position | None) -> dict[str, int] | None:
    return None if position is None else position._asdict()


def _position(fields: dict[str, Any] | None) -> Position | None:
    return None if fields is None else Position(int(fields["seq"]), int(fields["offset"]))


@dataclass(frozen=True)
class Chain:
    """All leases of a unit, fence 0 first."""

    leases: tuple[Lease, ...]

    def fence_of(self, incarnation: str, position: Position) -> int | None:
        """Under which fence a commit counts for the unit; None if it is void.

        It counts if its incarnation held the unit when the commit was made, as far as its successor's cut
        says so. Resume, readers, status, `verify` and `finalize` all ask here.
        """
        for lease, successor in zip(self.leases, (*self.leases[1:], None), strict=True):
            if lease.incarnation != incarnation or (lease.since is not None and position <= lease.since):
                continue
            if successor is None or (successor.cut is not None and position <= successor.cut):
                return lease.fence
        return None

    @property
    def holder(self) -> str | None:
        return self.leases[-1].incarnation

    @property
    def parts_cut(self) -> set[str]:
        """The parts that cuts speak of, and those that came before them: each has a journal."""
        return {
            part_name(lease.incarnation, seq)
            for lease, successor in pairwise(self.leases)
            if lease.incarnation is not None and successor.cut is not None
            for seq in range(successor.cut.seq + 1)
        }

    @property
    def incarnations(self) -> set[str]:
        """All that ever held the unit."""
        return {lease.incarnation for lease in self.leases if lease.incarnation is not None}


class Leases:
    """The leases of a job. Those read are kept: they never change."""

    def __init__(self, store: Store, job: Path) -> None:
        self._store = store
        self._job = job
        self._known: dict[tuple[int, int], Lease] = {}

    def fences(self, num_units: int) -> np.ndarray:
        """The highest fence of each unit, int32 [num_units], -1 where there is none. Reads names only."""
        fences = np.full(num_units, -1, np.int32)
        for folder in self._store.names(self._job / LEASES):
            for name in self._store.names(self._job / LEASES / folder):
                unit, _, fence = name.partition(".")
                if not (unit.isdigit() and fence.isdigit()):
                    raise ValueError(f"{self._job / LEASES / folder / name} is no lease: take it away")
                # a worker that knows of more files of input than we do may hold units behind ours
                if int(unit) < num_units:
                    fences[int(unit)] = max(fences[int(unit)], int(fence))
        return fences

    def exists(self, unit: int, fence: int) -> bool:
        return (unit, fence) in self._known or self._store.exists(lease_path(self._job, unit, fence))

    def lease(self, unit: int, fence: int) -> Lease:
        """Raises ValueError if the file is missing or no such lease."""
        if (unit, fence) not in self._known:
            self._known[unit, fence] = self._read(unit, fence)
        return self._known[unit, fence]

    def chain(self, unit: int, fence: int) -> Chain:
        """The unit's leases up to `fence`. Raises ValueError if one is missing or damaged."""
        return Chain(tuple(self.lease(unit, lower) for lower in range(fence + 1)))

    def chains(self, units: Iterable[int], fences: np.ndarray) -> dict[int, Chain]:
        """The chains of those of `units` that changed hands. The others need none: all of their rows count.

        fences: what `fences` gave.
        """
        return {unit: self.chain(unit, int(fences[unit])) for unit in units if fences[unit] > 0}

    def create(self, lease: Lease) -> bool:
        """Makes the lease, durably; False if somebody else has that fence."""
        return self._store.create_new(lease_path(self._job, lease.unit, lease.fence), lease.encode())

    def _read(self, unit: int, fence: int) -> Lease:
        path = lease_path(self._job, unit, fence)
        try:
            lease = Lease.decode(self._store.read(path))
        except FileNotFoundError:
            raise ValueError(f"lease {path} is missing: restore the file") from None
        except ValueError as error:
            raise ValueError(f"lease {path} is damaged ({error}): restore the file") from error
        if (lease.unit, lease.fence) != (unit, fence):
            raise ValueError(f"lease {path} speaks of unit {lease.unit}, fence {lease.fence}: restore it")
        return lease
