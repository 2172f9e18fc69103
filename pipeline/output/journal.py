"""What of a part counts: one journal beside each part, a line for every commit.

Knows: the lines' form, how they are appended and how they are read back, in whole or only the end.
Refuses to know: Arrow, rows, the job. Times in here are for people; nothing is ordered by them.

    {"kind": "header", "part": ..., "incarnation": ..., "worker": ..., "fingerprint": ..., "offset": ...}
    {"kind": "commit", "seq": 0, "offset": ..., "rows": ..., "sha256": ..., "units": [[unit, rows, ...]], ...}
    {"kind": "closed", "offset": ..., "time": ...}

A last line that is torn never counted: it is skipped. Anything else that is not as it should be raises
ValueError with file and line.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from pipeline.store import Store, open_store

_TAIL_BYTES = 64 * 1024
# More than a header ever takes: names, hashes, a few numbers.
_HEADER_BYTES = 16 * 1024


class UnitRows(NamedTuple):
    """How many rows of a unit a commit holds; of them `errors`; of them `retried`, voiding earlier errors."""

    unit: int
    rows: int
    errors: int
    retried: int


@dataclass(frozen=True)
class Totals:
    """What a part holds up to and with a commit."""

    rows: int = 0
    retried: int = 0
    errors: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Totals) -> Totals:
        return Totals(*(mine - theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def astuple(totals: Totals) -> tuple[int, ...]:
    return tuple(getattr(totals, field.name) for field in dataclasses.fields(totals))


@dataclass(frozen=True)
class Header:
    """Whose part this is.

    offset, sha256: end and hash of the schema at the part's beginning. started: when the process began
    to cost money, for the first part of a process, else when the part began.
    """

    part: str
    incarnation: str
    worker: str
    fingerprint: str
    schema: str
    offset: int
    sha256: str
    started: float
    time: float
    gpu_hour_usd: float


@dataclass(frozen=True)
class Commit:
    """Bytes up to `offset` count from now on; sha256 is that of the bytes since the last commit."""

    seq: int
    offset: int
    rows: int
    sha256: str
    units: tuple[UnitRows, ...]
    totals: Totals
    time: float


@dataclass(frozen=True)
class Closed:
    """The part ended properly: the end-of-stream mark lies before `offset`."""

    offset: int
    time: float


Entry: TypeAlias = Header | Commit | Closed
_KINDS: dict[str, type] = {"header": Header, "commit": Commit, "closed": Closed}


def encode(entry: Entry) -> bytes:
    kind = next(name for name, cls in _KINDS.items() if isinstance(entry, cls))
    return (json.dumps({"kind": kind, **dataclasses.asdict(entry)}, separators=(",", ":")) + "\n").encode()


def decode(line: bytes) -> Entry:
    """Raises ValueError if the line is not one of ours."""
    # as text: json guesses another encoding where it sees zeros
    fields = json.loads(line.decode())
    if not isinstance(fields, dict) or fields.get("kind") not in _KINDS:
        raise ValueError("no line of a journal")
    cls = _KINDS[fields.pop("kind")]
    if set(fields) != {field.name for field in dataclasses.fields(cls)}:
        raise ValueError(f"a {cls.__name__.lower()} line has other fields: {sorted(fields)}")
    if cls is Commit:
        fields["units"] = tuple(UnitRows(*(_integer(value) for value in unit)) for unit in fields["units"])
        fields["totals"] = Totals(**{name: _integer(value) for name, value in fields["totals"].items()})
    for name in ("seq", "offset", "rows"):
        if name in fields:
            _integer(fields[name])
    entry: Entry = cls(**fields)
    return entry


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def read(path: Path, store: Store | None = None) -> Iterator[Entry]:
    """The entries of a journal that count, one at a time. Empty if the header itself is torn.

    Raises ValueError naming file and line, FileNotFoundError.
    """
    yield from JournalReader(path, store or open_store(path)).entries()


class JournalReader:
    """Reads a journal that grows: each `entries` goes on where the last one ended."""

    def __init__(self, path: Path, store: Store) -> None:
        self.path = path
        self._store = store
        self._offset = 0
        self._number = 1
        self._last: Entry | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing can follow."""
        return isinstance(self._last, Closed)

    def entries(self) -> Iterator[Entry]:
        """What came since. A last line that is torn is left for the next time: it may still be written.

        Raises ValueError naming file and line, FileNotFoundError.
        """
        if self.ended:
            return
        lines = self._store.read(self.path, self._offset).splitlines(keepends=True)
        for place, line in enumerate(lines):
            entry = _decode_at(self.path, self._number, line, is_last=place == len(lines) - 1)
            if entry is None:
                return
            _check_follows(self.path, self._number, self._last, entry)
            self._last = entry
            self._offset += len(line)
            self._number += 1
            yield entry


def _decode_at(path: Path, number: int, line: bytes, is_last: bool) -> Entry | None:
    if is_last and not line.endswith(b"\n"):
        return None
    try:
        return decode(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        # after a power cut the end of a line may be on disk and its beginning not
        if is_last:
            return None
        raise ValueError(f"{path}, line {number}: {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}, line {number}: {error}") from error


def _check_follows(path: Path, number: int, last: Entry | None, entry: Entry) -> None:
    ok = False
    if isinstance(entry, Header):
        ok = last is None
    elif isinstance(last, Header | Commit):
        ok = entry.offset > last.offset
        if isinstance(entry, Commit):
            ok = ok and entry.seq == (last.seq + 1 if isinstance(last, Commit) else 0)
    if not ok:
        raise ValueError(f"{path}, line {number}: does not follow the line before it")


@dataclass(frozen=True)
class Tail:
    """The beginning and the last few commits of a journal: enough for rates, cheap for any length.

    lines: the last commits, ascending, as they are in the file: few of them are ever looked at.
    """

    path: Path
    header: Header
    lines: tuple[bytes, ...]
    closed: Closed | None

    @property
    def commits(self) -> tuple[Commit, ...]:
        return tuple(self._commit(line) for line in self.lines)

    @property
    def first(self) -> Commit | None:
        return self._commit(self.lines[0]) if self.lines else None

    @property
    def last(self) -> Commit | None:
        return self._commit(self.lines[-1]) if self.lines else None

    @property
    def totals(self) -> Totals:
        return self.last.totals if self.last else Totals()

    def before(self, moment: float) -> Commit | None:
        """The last commit up to a moment; None if those that are known are later."""
        place = bisect.bisect_right(self.lines, moment, key=lambda line: self._commit(line).time)
        return self._commit(self.lines[place - 1]) if place else None

    def _commit(self, line: bytes) -> Commit:
        entry = _decode_at(self.path, 0, line, is_last=False)
        if not isinstance(entry, Commit):
            raise ValueError(f"{self.path}: a line between commits is none")
        return entry


def read_tail(path: Path, store: Store | None = None) -> Tail | None:
    """Reads the first line and the last 64 KiB at most. None if the header is torn.

    Raises ValueError naming the file, FileNotFoundError.
    """
    store = store or open_store(path)
    first = store.read(path, 0, _HEADER_BYTES).partition(b"\n")
    header_line = b"".join(first[:2])
    header = _decode_at(path, 1, header_line, is_last=not first[2])
    if header is None:
        return None
    if not isinstance(header, Header):
        raise ValueError(f"{path}, line 1: no header")
    begin = max(len(header_line), store.size(path) - _TAIL_BYTES)
    lines = store.read(path, begin).splitlines(keepends=True)
    if begin > len(header_line):
        lines = lines[1:]
    end = _decode_at(path, 0, lines[-1], is_last=True) if lines else None
    if lines and not isinstance(end, Commit):
        lines.pop()
    if not lines and begin > len(header_line):
        # one line longer than the tail
        lines = [encode(entry) for entry in read(path, store) if isinstance(entry, Commit)][-1:]
    return Tail(path, header, tuple(lines), end if isinstance(end, Closed) else None)


class JournalWriter:
    """Appends entries; each is on disk when `append` returns."""

    def __init__(self, path: Path, header: Header, store: Store | None = None) -> None:
        self.path = path
        self._file = (store or open_store(path)).append(path)
        self.append(header)
        self._file.sync_name()

    def append(self, entry: Entry) -> None:
        self._file.write(encode(entry))
        self._file.sync()

    def close(self) -> None:
        self._file.close()
