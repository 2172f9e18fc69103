"""The units of one worker: which it holds, what of them is still to make, where the next one comes from.

Knows: its own claims, and the steps by which it gets another: a free unit, one of the dead, one that a
living worker has not begun. Refuses to know: threads that wait (`work.py`), engines, files of rows. Every
step is a call that returns at once, so that a simulation can take them in any order.

Slots as in `output/stored.py`: (ordinal - unit.start) * samples + sample.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from pipeline import durable
from pipeline.cluster.leases import LeaseTaker
from pipeline.cluster.others import Others, Takeable
from pipeline.cluster.policy import next_free
from pipeline.cluster.time_limit import TimeLimit
from pipeline.cluster.watch import Watch
from pipeline.cluster.workers import Member
from pipeline.input.order import Unit
from pipeline.input.rows import Row
from pipeline.output.chains import Chain, Leases
from pipeline.output.keys import ranges_of
from pipeline.output.ledger import JournalScan, Ledger
from pipeline.output.progress import JobDirectory
from pipeline.output.stored import StoredRows, StoredUnit
from pipeline.output.writer import Kept
from pipeline.request import Request

# A search costs more the larger the job is: of the time, at most this share goes into it.
_SEARCH_SHARE = 0.1
# How much the last unit weighs in the mean time per unit.
_NEWEST = 0.5


class Verdict(Enum):
    """Why there is no further unit."""

    wait = "nothing to do at this moment"
    complete = "every unit is complete"
    with_others = "what is left is with workers that are alive"
    no_time = "the time left is too short for another unit"


@dataclass(frozen=True)
class Claim:
    """A unit to work on. missing bool [rows, samples]: what is to be made."""

    unit: Unit
    fence: int
    missing: np.ndarray

    def ranges(self) -> list[range]:
        """Ordinals of rows that lack something, ascending."""
        rows = np.flatnonzero(self.missing.any(axis=1)) + self.unit.start
        return [range(start, stop) for start, stop in ranges_of(rows)]

    def samples(self, row: Row) -> tuple[int, ...]:
        """Which samples of a row are missing."""
        return tuple(np.flatnonzero(self.missing[row.ordinal - self.unit.start]).tolist())


@dataclass
class _Held:
    """A unit in work. bool [slots] each: missing: not there yet. waiting: of these, not let into the engine.
    retries: stands for an error."""

    unit: Unit
    fence: int
    missing: np.ndarray
    waiting: np.ndarray
    retries: np.ndarray
    since: float
    started: bool = False


class Claims:
    """One worker's claims on a job.

    `advance` belongs to one thread; `admit`, `finish` and `lost` to the one that generates and commits.
    retry_errors: complete units with errors are taken once more. hint: where to begin in an untouched job, 0
    to 1. poll_s: least time between two searches through what others do.
    """

    def __init__(
        self,
        directory: JobDirectory,
        member: Member,
        watch: Watch,
        *,
        retry_errors: bool = False,
        hint: float | None = None,
        limit: TimeLimit | None = None,
        poll_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        store, job = directory.store, directory.path
        self._directory = directory
        self._member = member
        self._clock = clock
        self._limit = limit or TimeLimit(None)
        self._hint = hint
        self._poll_s = poll_s
        self._retry_errors = retry_errors
        self._leases = Leases(store, job)
        self._taker = LeaseTaker(store, job, self._leases, member.incarnation, wall)
        self._scan = JournalScan(store, job)
        fences = self._leases.fences(len(directory.units))
        self._claimed = fences >= 0
        self.others = Others(directory, self._scan, self._leases, watch, member.incarnation, fences)
        self._last: int | None = None
        self._mean_unit_s: float | None = None
        # held during a commit, and while a unit is taken that this process held before
        self.commit_lock: AbstractContextManager[Any] = threading.Lock()
        # guards what follows; notified when a unit is finished or lost
        self._changed = threading.Condition()
        self._held: dict[int, _Held] = {}
        # units that were lost and came back, by their latest fence
        self._retaken: dict[int, int] = {}
        # whether something was finished since the last commit
        self._uncommitted = False
        self._takeable: list[Takeable] = []
        self._idle_since: float | None = None
        self._must_search = True
        self._next_search = clock()

    # ---------------------------------------------------------------- the next unit

    def advance(self) -> Claim | Verdict:
        """Takes a unit, or says why there is none. Raises ValueError for damaged files, FullDisk, OSError."""
        with durable.full_disk_named(self._directory.path):
            if not self._limit.allows(self._mean_unit_s):
                self._give_back_unstarted()
                return Verdict.no_time
            claim = self._claim_free() or self._claim_of_others()
        if claim is None:
            return self._verdict()
        self._idle_since = None
        return claim

    def count_missing(self) -> int:
        """Results that are to be made, by whomever. To be asked before `advance` has its own thread."""
        _, _, errors = self.others.count()
        again = int(errors.sum()) if self._retry_errors else 0
        return self._directory.num_results - self.others.num_done + again

    def wait(self, seconds: float) -> None:
        """Returns after so long, or sooner if `advance` may have something else to say."""
        with self._changed:
            left = min(seconds, self._next_search - self._clock())
            decided = self._must_search or not (self._held or self.others.open or len(self.others.unlisted))
            if left > 0 and not decided:
                self._changed.wait(left)

    @property
    def wants_commit(self) -> bool:
        """Whether a commit is all that this worker can do to come to a decision."""
        with self._changed:
            return self._uncommitted and bool(self.others.open) and not self._held

    def give_back(self, number: int) -> bool:
        """Lets a unit go, with what is committed of it; False if it is not held."""
        with self._changed:
            held = self._held.pop(number, None)
        if held is None:
            return False
        return self._taker.give_back(self._leases.chain(number, held.fence))

    def _claim_free(self) -> Claim | None:
        units = self._directory.units
        while (number := next_free(self._claimed, self._last, self._hint)) is not None:
            if self._taker.claim(number):
                self._claimed[number] = True
                self._last = number
                num_slots = (units[number].stop - units[number].start) * self._directory.samples
                return self._hold(units[number], 0, np.ones(num_slots, bool), np.zeros(num_slots, bool))
            # what this worker knew of the others was out of date
            self._claimed |= self._leases.fences(len(units)) >= 0
            self._claimed[number] = True
        return None

    def _claim_of_others(self) -> Claim | None:
        if self._idle_since is None:
            self._idle_since = self._clock()
            self._must_search = True
        if not self._takeable and (self._must_search or self._clock() >= self._next_search):
            self._search()
        while self._takeable:
            claim = self._take(self._takeable.pop(0))
            if claim is not None:
                return claim
            # somebody was first: with whom the unit is now, the last search does not know
            self._must_search = True
        return None

    def _search(self) -> None:
        began = self._clock()
        self._must_search = False
        # while one's own rows wait for the engine, another's would only wait longer here
        self._takeable = self.others.search(may_steal=not self._any_waiting(), retry=self._retry_errors)
        # a network file system may list a name late; whether it is taken, only trying tells
        self._claimed[self.others.unlisted] = False
        ended = self._clock()
        self._next_search = ended + max(self._poll_s, (ended - began) / _SEARCH_SHARE)

    def _take(self, takeable: Takeable) -> Claim | None:
        number, fence = takeable.unit, takeable.fence + 1
        if self._leases.exists(number, fence):
            return None
        chain = self._leases.chain(number, takeable.fence)
        again = self._member.incarnation in chain.incarnations
        with self.commit_lock if again else nullcontext():
            if not self._taker.take_over(chain):
                return None
            if again:
                self._retaken[number] = fence
        stored = self._stored(self._leases.chain(number, fence))
        missing = ~stored.done(count_errors=not self._retry_errors)
        retries = np.zeros_like(missing)
        if self._retry_errors:
            retries[stored.slots[stored.current & stored.failed]] = True
        return self._hold(stored.unit, fence, missing, retries) if missing.any() else None

    def _stored(self, chain: Chain) -> StoredUnit:
        """What of a unit counts, by its chain."""
        # what a cut lets count must be seen, or it is made twice
        self._scan.refresh(chain.incarnations, known=chain.parts_cut)
        number = chain.leases[-1].unit
        directory = self._directory
        ledger = Ledger(directory.path, self._scan.tables(), {number: chain}, directory.store)
        return StoredRows(ledger, directory.order, directory.samples).unit(directory.units[number])

    def _hold(self, unit: Unit, fence: int, missing: np.ndarray, retries: np.ndarray) -> Claim:
        with self._changed:
            self._held[unit.number] = _Held(
                unit, fence, missing.copy(), missing.copy(), retries, self._clock()
            )
        return Claim(unit, fence, missing.reshape(-1, self._directory.samples))

    def _verdict(self) -> Verdict:
        with self._changed:
            if self._held or self._must_search or len(self.others.unlisted):
                return Verdict.wait
        if not self.others.open:
            return Verdict.complete
        assert self._idle_since is not None
        # Of all who leave the rest to each other, the last must see that there is none: so each first shows
        # what it has made, and looks once more.
        if self._uncommitted or not self.others.all_moved_since(self._idle_since):
            return Verdict.wait
        return Verdict.with_others

    def _give_back_unstarted(self) -> None:
        with self._changed:
            unstarted = [number for number, held in self._held.items() if not held.started]
        for number in unstarted:
            self.give_back(number)

    # ---------------------------------------------------------------- what becomes of it

    def held(self) -> list[tuple[int, bool]]:
        """The units in work, in the order of their claims, and whether they were begun."""
        with self._changed:
            return [(number, held.started) for number, held in self._held.items()]

    def admit(self, request: Request, sample: int) -> bool:
        """Asked when the engine lets a sequence in: whether its unit is still ours. Begins the unit."""
        held, slot = self._find(request.payload.row.ordinal, sample)
        if held is None:
            return False
        if not held.started and self._is_taken_over(held.unit.number, held.fence):
            self._lose(held)
            return False
        with self._changed:
            held.waiting[slot] = False
            self._start(held)
        return True

    def finish(self, ordinal: int, sample: int) -> Kept | None:
        """See Ownership."""
        held, slot = self._find(ordinal, sample)
        if held is None or not held.missing[slot]:
            return None
        with self._changed:
            self._uncommitted = True
            held.missing[slot] = held.waiting[slot] = False
            self._start(held)
            if not held.missing.any():
                self._end(held)
                newest = self._clock() - held.since
                mean = newest if self._mean_unit_s is None else self._mean_unit_s
                self._mean_unit_s = mean + _NEWEST * (newest - mean)
        return Kept(held.unit.number, held.fence, bool(held.retries[slot]))

    def lost(self, leases: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """See Ownership."""
        # what was finished under an earlier lease of one's own is made again under the later: no disk is
        # asked about that, for on this rests that no row is written twice
        lost = {
            (unit, fence)
            for unit, fence in leases
            if self._retaken.get(unit, fence) > fence or self._is_taken_over(unit, fence)
        }
        for unit, fence in lost:
            held = self._held.get(unit)
            if held is not None and held.fence == fence:
                self._lose(held)
        return lost

    def committed(self) -> None:
        """See Ownership."""
        with self._changed:
            self._uncommitted = False
            self._look_again_if_idle()
            self._changed.notify_all()

    def _is_taken_over(self, unit: int, fence: int) -> bool:
        return self._leases.exists(unit, fence + 1)

    def _find(self, ordinal: int, sample: int) -> tuple[_Held | None, int]:
        number = int(self._directory.units.numbers(np.array([ordinal]))[0])
        held = self._held.get(number)
        return held, 0 if held is None else (ordinal - held.unit.start) * self._directory.samples + sample

    def _start(self, held: _Held) -> None:
        if not held.started:
            held.started = True
            self._member.news.set()

    def _lose(self, held: _Held) -> None:
        with self._changed:
            self._must_search = True
            self._end(held)

    def _end(self, held: _Held) -> None:
        if self._held.get(held.unit.number) is held:
            del self._held[held.unit.number]
        self._look_again_if_idle()
        self._changed.notify_all()

    def _look_again_if_idle(self) -> None:
        # who else is still at work decides whether this one leaves
        self._must_search = self._must_search or (not self._held and bool(self.others.open))

    def _any_waiting(self) -> bool:
        with self._changed:
            return any(held.waiting.any() for held in self._held.values())
