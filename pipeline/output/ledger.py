"""All journals of a job read together: which commits hold rows of which unit.

Knows: journals. Refuses to know: what is inside the parts. Kept in flat arrays, some 50 bytes for each
commit and each unit that a commit touches, so that long jobs stay cheap.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.output import journal
from pipeline.output.journal import Closed, Commit, Header, Totals
from pipeline.output.layout import journal_names, journal_path


class CommitRef(NamedTuple):
    """Where a commit's rows lie. Sorts in the order in which commits void each other's rows."""

    number: int
    part: int
    start: int
    stop: int
    rows: int


@dataclass(frozen=True)
class Part:
    """A part as its journal tells it: bytes up to `committed` count."""

    header: Header
    committed: int
    totals: Totals
    closed: Closed | None
    epoch: int


class Ledger:
    """Parts in the order in which their rows count (by epoch, then name), with all their commits."""

    def __init__(self, job: Path, parts: list[Part], commits: np.ndarray, touched: np.ndarray) -> None:
        """commits int64 [C, 4]: part, start, stop, rows.
        touched int64 [T, 5]: commit, unit, rows, errors, retried."""
        self.job = job
        self.parts = parts
        self._commits = commits
        self._touched = touched
        # stable: within a unit the commits keep their order
        self._by_unit = np.argsort(touched[:, 1], kind="stable")
        self._units = touched[self._by_unit, 1]

    @classmethod
    def read(cls, job: Path) -> Ledger:
        """Raises ValueError for a malformed journal, naming file and line."""
        headers = [
            (header, name) for name in journal_names(job) if (header := _header(job, name)) is not None
        ]
        headers.sort(key=lambda item: (item[0].epoch, item[1]))
        parts: list[Part] = []
        commits, touched = array("q"), array("q")
        for _, name in headers:
            parts.append(_read_part(journal_path(job, name), len(parts), commits, touched))
        return cls(job, parts, _table(commits, 4), _table(touched, 5))

    @property
    def totals(self) -> Totals:
        return sum((part.totals for part in self.parts), Totals())

    @property
    def next_epoch(self) -> int:
        return max((part.epoch for part in self.parts), default=-1) + 1

    @property
    def num_units(self) -> int:
        """One above the highest unit that any commit names."""
        return int(self._units[-1]) + 1 if len(self._units) else 0

    def sums(self, num_units: int) -> tuple[np.ndarray, np.ndarray]:
        """int64 [num_units] each: rows that count, and those of them that are errors."""
        rows, errors = np.zeros(num_units, np.int64), np.zeros(num_units, np.int64)
        np.add.at(rows, self._touched[:, 1], self._touched[:, 2] - self._touched[:, 4])
        # what is generated again was an error
        np.add.at(errors, self._touched[:, 1], self._touched[:, 3] - self._touched[:, 4])
        return rows, errors

    def num_retried(self, unit: int) -> int:
        return int(self._touched[self._of_unit(unit), 4].sum())

    def commits(self, unit: int) -> list[CommitRef]:
        """The commits that hold rows of this unit, in the order in which they count."""
        return [self.commit(int(number)) for number in self._touched[self._of_unit(unit), 0]]

    def rows_claimed(self, unit: int) -> list[int]:
        """How many rows of this unit each of `commits(unit)` says it holds."""
        rows: list[int] = self._touched[self._of_unit(unit), 2].tolist()
        return rows

    def commit(self, number: int) -> CommitRef:
        part, start, stop, rows = self._commits[number].tolist()
        return CommitRef(number, part, start, stop, rows)

    def all_commits(self) -> Iterator[CommitRef]:
        return (self.commit(number) for number in range(len(self._commits)))

    @property
    def num_commits(self) -> int:
        return len(self._commits)

    def units_of(self, ref: CommitRef) -> list[int]:
        begin, end = np.searchsorted(self._touched[:, 0], [ref.number, ref.number + 1])
        units: list[int] = self._touched[begin:end, 1].tolist()
        return units

    def _of_unit(self, unit: int) -> np.ndarray:
        begin, end = np.searchsorted(self._units, [unit, unit + 1])
        return self._by_unit[begin:end]


def _header(job: Path, name: str) -> Header | None:
    path = journal_path(job, name)
    entry = next(journal.read(path), None)
    if entry is None:
        # killed while the journal was made: nothing of this part was ever committed
        return None
    if not isinstance(entry, Header) or entry.part != name:
        raise ValueError(f"{path}, line 1: is not the header of part {name}")
    return entry


def _read_part(path: Path, part: int, commits: array[int], touched: array[int]) -> Part:
    header: Header | None = None
    totals, committed, closed = Totals(), 0, None
    for entry in journal.read(path):
        if isinstance(entry, Header):
            header, committed = entry, entry.offset
        elif isinstance(entry, Commit):
            number = len(commits) // 4
            commits.extend((part, committed, entry.offset, entry.rows))
            for unit in entry.units:
                touched.extend((number, *unit))
            totals, committed = entry.totals, entry.offset
        else:
            closed = entry
    assert header is not None
    return Part(header, committed, totals, closed, header.epoch)


def _table(values: array[int], width: int) -> np.ndarray:
    return np.frombuffer(values, np.int64).reshape(-1, width) if values else np.empty((0, width), np.int64)
