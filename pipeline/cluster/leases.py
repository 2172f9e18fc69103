"""Taking leases: claiming a unit, taking it over, giving it back.

Knows: what a new lease must say so that every row counts once. Refuses to know: which unit to take, and
whether its holder is dead: whoever is wrong about that loses work, never rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pipeline.output import journal
from pipeline.output.chains import Chain, Lease, Leases, Position
from pipeline.output.layout import journal_names, journal_path, split_part_name
from pipeline.store import Store


class LeaseTaker:
    """Takes leases for one incarnation."""

    def __init__(
        self,
        store: Store,
        job: Path,
        leases: Leases,
        incarnation: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._job = job
        self._leases = leases
        self._incarnation = incarnation
        self._wall = wall

    def claim(self, unit: int) -> bool:
        """Takes a unit that nobody ever had; False if somebody was first."""
        return self._leases.create(Lease(unit, 0, self._incarnation, None, None, self._wall()))

    def take_over(self, chain: Chain) -> bool:
        """Takes the unit from the holder of `chain`; False if somebody was first.

        What its journals hold at this moment counts, what it writes later is void. No commit of this
        process may be under way if it held the unit before.
        """
        return self._follow(chain, self._incarnation)

    def give_back(self, chain: Chain) -> bool:
        """Gives up a unit that this incarnation holds, with the rows committed so far."""
        assert chain.holder == self._incarnation, "only its holder gives a unit back"
        return self._follow(chain, None)

    def _follow(self, chain: Chain, incarnation: str | None) -> bool:
        last = chain.leases[-1]
        cut = None if last.incarnation is None else last_commit(self._store, self._job, last.incarnation)
        since = None
        if incarnation is not None and incarnation in chain.incarnations:
            # what it wrote as an earlier holder was judged by the cut of then
            since = last_commit(self._store, self._job, incarnation)
        return self._leases.create(Lease(last.unit, last.fence + 1, incarnation, cut, since, self._wall()))


def last_commit(store: Store, job: Path, incarnation: str) -> Position | None:
    """The last whole commit of an incarnation as its journals have it now, made durable; None if none."""
    mine = [split_part_name(name) for name in journal_names(job, store)]
    for seq in sorted((seq for owner, seq in mine if owner == incarnation), reverse=True):
        path = journal_path(job, f"{incarnation}-{seq:05d}")
        tail = journal.read_tail(path, store)
        if tail is not None and tail.last is not None:
            # its writer may have died before its own fsync; what a cut lets count must stay
            store.settle(path)
            return Position(seq, tail.last.offset)
    return None
