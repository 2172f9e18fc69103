"""What of a part counts: one journal beside each part, a line for every commit.

Knows: the lines' form, how they are appended and how they are read back, in whole or only the end.
Refuses to know: Arrow, rows, the job. Times in here are for people; nothing is ordered by them.

    {"kind": "header", "part": ..., "worker": ..., "epoch": ..., "fingerprint": ..., "offset": ...}
    {"kind": "commit", "seq": 0, "offset": ..., "rows": ..., "sha256": ..., "units": [[unit, rows, ...]], ...}
    {"kind": "closed", "offset": ..., "time": ...}

A last line that is torn never counted: it is skipped. Anything else that is not as it should be raises
ValueError with file and line.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from pipeline import durable

_TAIL_BYTES = 64 * 1024


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
    """Whose part this is. `epoch` counts the starts of the job: a retried row of a later one wins.

    offset, sha256: end and hash of the schema at the part's beginning. started: when the process began
    to cost money, for the first part of a process, else when the part began.
    """

    part: str
    worker: str
    epoch: int
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
    for name in ("epoch", "seq", "offset", "rows"):
        if name in fields:
            _integer(fields[name])
    entry: Entry = cls(**fields)
    return entry


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def read(path: Path) -> Iterator[Entry]:
    """The entries of a journal that count, one at a time. Empty if the header itself is torn.

    Raises ValueError naming file and line, FileNotFoundError.
    """
    last: Entry | None = None
    with open(path, "rb") as file:
        line, number = file.readline(), 1
        while line:
            following = file.readline()
            entry = _decode_at(path, number, line, is_last=not following)
            if entry is None:
                return
            _check_follows(path, number, last, entry)
            yield entry
            last, line, number = entry, following, number + 1


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
    """The beginning and the last few commits of a journal: enough for rates, cheap for any length."""

    header: Header
    commits: tuple[Commit, ...]
    closed: Closed | None

    @property
    def totals(self) -> Totals:
        return self.commits[-1].totals if self.commits else Totals()


def read_tail(path: Path) -> Tail | None:
    """Reads the first line and the last 64 KiB at most. None if the header is torn."""
    with open(path, "rb") as file:
        first = file.readline()
        header = _decode_at(path, 1, first, is_last=not first.endswith(b"\n"))
        if header is None:
            return None
        begin = max(file.tell(), os.fstat(file.fileno()).st_size - _TAIL_BYTES)
        file.seek(begin)
        lines = file.read().splitlines(keepends=True)
    if begin > len(first):
        lines = lines[1:]
    entries = [_decode_at(path, 0, line, is_last=i == len(lines) - 1) for i, line in enumerate(lines)]
    if not isinstance(header, Header):
        raise ValueError(f"{path}, line 1: no header")
    commits = tuple(entry for entry in entries if isinstance(entry, Commit))
    if not commits and begin > len(first):
        # one line longer than the tail
        commits = tuple([entry for entry in read(path) if isinstance(entry, Commit)][-1:])
    return Tail(header, commits, next((e for e in entries if isinstance(e, Closed)), None))


class JournalWriter:
    """Appends entries; each is on disk when `append` returns."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._descriptor = durable.create(path)
        self.append(header)
        durable.fsync_directory(path.parent)

    def append(self, entry: Entry) -> None:
        durable.write(self._descriptor, encode(entry))
        durable.fsync_file(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
