"""What the files of a job tell of its progress while nobody reads a row: records, ends of journals, leases.

Knows: how to find what was made in vain without reading every journal. Refuses to know: rates, money, words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from pipeline.cluster.workers import WorkerRecord, read_record
from pipeline.output import journal
from pipeline.output.chains import Chain, Leases, Position
from pipeline.output.journal import Closed, Commit, Header, Totals, UnitRows
from pipeline.output.layout import incarnations, journal_names, journal_path, split_part_name
from pipeline.store import Store


@dataclass(frozen=True)
class PartEnd:
    """A part as the end of its journal shows it.

    last: its last commit. earlier: the last one before the moments that rates are of, or the first that is
    known; the same as `last` in a part without commits in that time. void: what of it does not count.
    """

    header: Header
    seq: int
    last: Commit | None
    earlier: Commit | None
    closed: Closed | None
    void: Totals

    @property
    def totals(self) -> Totals:
        return self.last.totals if self.last else Totals()


@dataclass(frozen=True)
class Survey:
    parts: tuple[PartEnd, ...]
    records: tuple[WorkerRecord, ...]


@dataclass(frozen=True)
class _End:
    header: Header
    seq: int
    last: Commit | None
    closed: Closed | None


def survey(job: Path, store: Store, num_units: int, window_s: float) -> Survey:
    """Looks once at every record and every journal's end.

    window_s: of how many seconds before the job's last commit rates are wanted. Raises ValueError for a
    damaged journal or lease, OSError.
    """
    ends = _ends(job, store)
    # after the journals: a commit must not count because the lease that voids it was not there yet
    void = _void(job, store, ends, num_units)
    begin = max((end.last.time for end in ends.values() if end.last), default=0.0) - window_s
    parts = [
        PartEnd(
            header=end.header,
            seq=end.seq,
            last=end.last,
            earlier=_earlier(job, store, name, end, begin),
            closed=end.closed,
            void=void.get(name, Totals()),
        )
        for name, end in ends.items()
    ]
    records = [read_record(store, job, incarnation) for incarnation in incarnations(job, store)]
    return Survey(tuple(parts), tuple(record for record in records if record is not None))


def _ends(job: Path, store: Store) -> dict[str, _End]:
    ends = {}
    for name in journal_names(job, store):
        tail = journal.read_tail(journal_path(job, name), store)
        if tail is not None:
            # nothing more of the tail is kept: there may be thousands
            ends[name] = _End(tail.header, split_part_name(name)[1], tail.last, tail.closed)
    return ends


def _earlier(job: Path, store: Store, name: str, end: _End, begin: float) -> Commit | None:
    if end.last is None or end.last.time <= begin:
        return end.last
    tail = journal.read_tail(journal_path(job, name), store)
    earlier = tail and (tail.before(begin) or tail.first)
    # so much may have come meanwhile that the tail begins behind what was the end
    return earlier if earlier and earlier.seq <= end.last.seq else end.last


def _void(job: Path, store: Store, ends: Mapping[str, _End], num_units: int) -> dict[str, Totals]:
    """What of each part does not count. Reads whole journals only of those who wrote on after a loss."""
    leases = Leases(store, job)
    fences = leases.fences(num_units)
    chains = leases.chains(np.flatnonzero(fences > 0).tolist(), fences)
    suspects = _suspects(chains.values(), ends.values()) if chains else set()
    return {
        name: _void_of(journal_path(job, name), store, end, chains)
        for name, end in ends.items()
        if end.header.incarnation in suspects
    }


def _suspects(chains: Iterable[Chain], ends: Iterable[_End]) -> set[str]:
    """Incarnations that committed anything after a unit of theirs was taken over."""
    last: dict[str, Position] = {}
    for end in ends:
        if end.last is not None:
            position = Position(end.seq, end.last.offset)
            last[end.header.incarnation] = max(position, last.get(end.header.incarnation, position))
    suspects = set()
    for chain in chains:
        for lease, successor in pairwise(chain.leases):
            holder = lease.incarnation
            if holder in last and (successor.cut is None or successor.cut < last[holder]):
                suspects.add(holder)
    return suspects


def _void_of(path: Path, store: Store, end: _End, chains: Mapping[int, Chain]) -> Totals:
    void, before = Totals(), Totals()
    for entry in journal.read(path, store):
        if isinstance(entry, Commit) and end.last is not None and entry.offset <= end.last.offset:
            added, before = entry.totals - before, entry.totals
            position = Position(end.seq, entry.offset)
            changed_hands = [unit for unit in entry.units if unit.unit in chains]
            owner = end.header.incarnation
            lost = [u for u in changed_hands if chains[u.unit].fence_of(owner, position) is None]
            void += _share(added, lost)
    return void


def _share(commit: Totals, units: Sequence[UnitRows]) -> Totals:
    """What of a commit belongs to some of its units; a journal tells tokens and skipped of all together."""
    rows = sum(unit.rows for unit in units)
    share = rows / commit.rows if commit.rows else 0.0
    return Totals(
        rows=rows,
        retried=sum(unit.retried for unit in units),
        errors=sum(unit.errors for unit in units),
        skipped=round(commit.skipped * share),
        prompt_tokens=round(commit.prompt_tokens * share),
        completion_tokens=round(commit.completion_tokens * share),
    )
