"""All journals of a job read together: which commits hold rows of which unit, and which of them count.

Knows: journals, and leases as far as they void commits. Refuses to know: what is inside the parts. Kept in
flat arrays, some 50 bytes for each commit and each unit that a commit touches, so that long jobs stay cheap.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.output.chains import Chain, Leases, Position
from pipeline.output.journal import Closed, Commit, Header, JournalReader, Totals
from pipeline.output.layout import journal_names, journal_path, split_part_name
from pipeline.store import Store, open_store


class CommitRef(NamedTuple):
    """Where a commit's rows lie."""

    number: int
    part: int
    start: int
    stop: int
    rows: int


@dataclass(frozen=True)
class Part:
    """A part as its journal tells it: bytes up to `committed` count."""

    header: Header
    seq: int
    committed: int
    totals: Totals
    closed: Closed | None


@dataclass(frozen=True)
class Tables:
    """What journals say, at one moment.

    commits int64 [C, 4]: part, start, stop, rows. touched int64 [T, 5]: commit, unit, rows, errors, retried.
    by_unit int64 [T]: places in touched, sorted by unit; units int64 [T]: those units.
    """

    parts: tuple[Part, ...]
    commits: np.ndarray
    touched: np.ndarray
    by_unit: np.ndarray
    units: np.ndarray


@dataclass
class _Journal:
    """A journal that is being followed."""

    reader: JournalReader
    part: Part | None = None
    # its commits and the units they touch, rows of Tables with numbers of its own
    commits: array[int] = field(default_factory=lambda: array("q"))
    touched: array[int] = field(default_factory=lambda: array("q"))


class JournalScan:
    """Reads the journals of a job; a second `refresh` reads only what came since."""

    def __init__(self, store: Store, job: Path) -> None:
        self.job = job
        self.store = store
        self._journals: dict[str, _Journal] = {}
        self._tables: Tables | None = None

    def refresh(self, of: Collection[str] | None = None, known: Collection[str] = ()) -> None:
        """of: only these incarnations. known: parts to look for even if no listing shows their journals.

        A network file system may show them late. Raises ValueError for a malformed journal, naming file and
        line.
        """
        listed = journal_names(self.job, self.store)
        for name in listed:
            if of is None or split_part_name(name)[0] in of:
                self._read(name)
        for name in sorted(set(known).difference(listed)):
            # gone if somebody took it away to have its rows made again
            with contextlib.suppress(FileNotFoundError):
                self._read(name)

    def _read(self, name: str) -> None:
        if name not in self._journals:
            self._journals[name] = _Journal(JournalReader(journal_path(self.job, name), self.store))
        if _follow(self._journals[name], name, split_part_name(name)[1]):
            self._tables = None

    def tables(self) -> Tables:
        if self._tables is None:
            found = sorted(self._journals.items(), key=lambda item: split_part_name(item[0]))
            self._tables = _tables([journal for _, journal in found if journal.part is not None])
        return self._tables


def _follow(journal: _Journal, name: str, seq: int) -> bool:
    """Takes in what a journal says since the last time; whether there was anything."""
    before = journal.part
    for entry in journal.reader.entries():
        part = journal.part
        if isinstance(entry, Header):
            if entry.part != name or entry.incarnation != split_part_name(name)[0]:
                raise ValueError(f"{journal.reader.path}, line 1: is not the header of part {name}")
            journal.part = Part(entry, seq, entry.offset, Totals(), None)
            continue
        assert part is not None, "a journal begins with its header"
        if isinstance(entry, Commit):
            number = len(journal.commits) // 3
            journal.commits.extend((part.committed, entry.offset, entry.rows))
            for unit in entry.units:
                journal.touched.extend((number, *unit))
            journal.part = Part(part.header, seq, entry.offset, entry.totals, None)
        else:
            journal.part = Part(part.header, seq, part.committed, part.totals, entry)
    return journal.part is not before


def _tables(journals: list[_Journal]) -> Tables:
    parts = tuple(journal.part for journal in journals if journal.part is not None)
    commits, touched, num_commits = [_EMPTY_COMMITS], [_EMPTY_TOUCHED], 0
    for number, journal in enumerate(journals):
        own = np.array(journal.commits, np.int64).reshape(-1, 3)
        commits.append(np.insert(own, 0, number, axis=1))
        # a copy: an array that lends out its memory could not grow
        of_units = np.array(journal.touched, np.int64).reshape(-1, 5)
        of_units[:, 0] += num_commits
        touched.append(of_units)
        num_commits += len(own)
    all_touched = np.concatenate(touched)
    by_unit = np.argsort(all_touched[:, 1], kind="stable")
    return Tables(parts, np.concatenate(commits), all_touched, by_unit, all_touched[by_unit, 1])


_EMPTY_COMMITS = np.empty((0, 4), np.int64)
_EMPTY_TOUCHED = np.empty((0, 5), np.int64)


class Ledger:
    """Commits by unit, those that count, in the order in which their rows count.

    chains: of the units that changed hands; of the others every commit counts.
    """

    def __init__(self, job: Path, tables: Tables, chains: Mapping[int, Chain], store: Store) -> None:
        self.job = job
        self.store = store
        self.parts = tables.parts
        self._tables = tables
        self._chains = chains

    @classmethod
    def read(cls, job: Path, store: Store | None = None) -> Ledger:
        """Raises ValueError for a malformed journal or lease, naming file and line."""
        store = store or open_store(job)
        scan = JournalScan(store, job)
        scan.refresh()
        return cls.of(scan, Leases(store, job))

    @classmethod
    def of(cls, scan: JournalScan, leases: Leases) -> Ledger:
        """What a scan found, judged by the leases of now.

        They must be read after the journals: a commit that is known must not count because the lease that
        voids it is not known yet.
        """
        tables = scan.tables()
        units = np.unique(tables.units)
        fences = leases.fences(int(units[-1]) + 1 if len(units) else 0)
        return cls(scan.job, tables, leases.chains(units[fences[units] > 0].tolist(), fences), scan.store)

    @property
    def num_units(self) -> int:
        """One above the highest unit that any commit names."""
        return int(self._tables.units[-1]) + 1 if len(self._tables.units) else 0

    @property
    def num_results(self) -> int:
        """Results that count."""
        return int(self.sums(self.num_units)[0].sum())

    def sums(self, num_units: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [num_units] each: rows that count, and those of them that are errors."""
        touched = self._tables.touched
        if self._chains:
            touched = np.delete(touched, self._void(), axis=0)
        rows, errors = np.zeros(num_units, np.int64), np.zeros(num_units, np.int64)
        np.add.at(rows, touched[:, 1], touched[:, 2] - touched[:, 4])
        # what is generated again was an error
        np.add.at(errors, touched[:, 1], touched[:, 3] - touched[:, 4])
        return rows, errors

    def touching(self) -> np.ndarray:
        """int64 [N, 2], ascending: each unit and a part that holds rows of it, whether or not they count."""
        touched = self._tables.touched
        pairs = np.stack([touched[:, 1], self._tables.commits[touched[:, 0], 0]], axis=1)
        return np.unique(pairs, axis=0)

    def counting(self) -> np.ndarray:
        """int64 [N, 2], ascending: each unit and a part that holds rows of it which count."""
        touched = np.delete(self._tables.touched, self._void(), axis=0)
        pairs = np.stack([touched[:, 1], self._tables.commits[touched[:, 0], 0]], axis=1)
        return np.unique(pairs, axis=0)

    def commits(self, unit: int) -> list[CommitRef]:
        """The commits whose rows of this unit count, in the order in which they void each other's."""
        return [self.commit(int(self._tables.touched[place, 0])) for place, _ in self._counted(unit)]

    def fences(self, unit: int) -> list[int]:
        """Under which fence each of `commits(unit)` counts."""
        return [fence for _, fence in self._counted(unit)]

    def rows_claimed(self, unit: int) -> list[int]:
        """How many rows of this unit each of `commits(unit)` says it holds."""
        return [int(self._tables.touched[place, 2]) for place, _ in self._counted(unit)]

    def num_retried(self, unit: int) -> int:
        return sum(int(self._tables.touched[place, 4]) for place, _ in self._counted(unit))

    def commit(self, number: int) -> CommitRef:
        part, start, stop, rows = self._tables.commits[number].tolist()
        return CommitRef(number, part, start, stop, rows)

    def all_commits(self) -> Iterator[CommitRef]:
        return (self.commit(number) for number in range(self.num_commits))

    @property
    def num_commits(self) -> int:
        return len(self._tables.commits)

    def units_of(self, ref: CommitRef) -> list[int]:
        begin, end = np.searchsorted(self._tables.touched[:, 0], [ref.number, ref.number + 1])
        units: list[int] = self._tables.touched[begin:end, 1].tolist()
        return units

    def counts(self, ref: CommitRef, unit: int) -> bool:
        """Whether the rows of this unit that a commit holds count (unless a later one voids them singly)."""
        return self._fence(ref.number, unit) is not None

    def _counted(self, unit: int) -> list[tuple[int, int]]:
        """(place in touched, fence) of what counts for the unit, in order of (fence, part, commit)."""
        begin, end = np.searchsorted(self._tables.units, [unit, unit + 1])
        places = self._tables.by_unit[begin:end].tolist()
        if unit not in self._chains:
            return [(place, 0) for place in places]
        judged = [(place, self._fence(int(self._tables.touched[place, 0]), unit)) for place in places]
        # places are those of one incarnation's parts in turn, so a stable sort keeps its commits in order
        return sorted(((place, fence) for place, fence in judged if fence is not None), key=lambda p: p[1])

    def _fence(self, commit: int, unit: int) -> int | None:
        chain = self._chains.get(unit)
        if chain is None:
            return 0
        part, _, stop, _ = self._tables.commits[commit].tolist()
        return chain.fence_of(self.parts[part].header.incarnation, Position(self.parts[part].seq, stop))

    def _void(self) -> list[int]:
        """Places in touched of what does not count."""
        void = []
        for unit in self._chains:
            begin, end = np.searchsorted(self._tables.units, [unit, unit + 1])
            for place in self._tables.by_unit[begin:end].tolist():
                if self._fence(int(self._tables.touched[place, 0]), unit) is None:
                    void.append(place)
        return void
