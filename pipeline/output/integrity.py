"""Whether the files of a job are whole: every part against its journal, byte by byte.

Knows: hashes, sizes, names. Refuses to know: what the rows should be (that is `verify.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from pipeline.output import journal
from pipeline.output.journal import Closed, Commit, Entry, Header
from pipeline.output.layout import journal_names, journal_path, part_names, part_path
from pipeline.output.part import END_OF_STREAM

_CHUNK_BYTES = 2**20


def file_problems(job: Path, fingerprint: str) -> Iterator[str]:
    """What is wrong with parts and journals, a line each. Reads every committed byte once."""
    journals = journal_names(job)
    for name in journals:
        try:
            yield from _part_problems(job, name, fingerprint)
        except ValueError as error:
            yield str(error)
        except OSError as error:
            yield f"part {part_path(job, name)} cannot be read: {error}"
    for name in sorted({*part_names(job)}.difference(journals)):
        # a kill between a part's creation and its journal's leaves a schema and no rows: harmless
        if _num_messages(part_path(job, name)) > 1:
            yield f"journal {journal_path(job, name)} is missing, and part {name} holds rows"


def _part_problems(job: Path, name: str, fingerprint: str) -> Iterator[str]:
    path = part_path(job, name)
    entries = journal.read(journal_path(job, name))
    header = next(entries, None)
    if header is None:
        if path.exists() and _num_messages(path) > 1:
            yield f"{journal_path(job, name)}, line 1: the header is torn, but {path} holds rows"
        return
    if not isinstance(header, Header) or header.part != name:
        yield f"{journal_path(job, name)}, line 1: is not the header of part {name}"
        return
    if header.fingerprint != fingerprint:
        yield f"part {path} belongs to another job (fingerprint {header.fingerprint}, not {fingerprint})"
    if not path.exists():
        yield f"part {path} is missing"
        return
    with open(path, "rb") as file:
        yield from _range_problems(path, file, header, header.offset, "its schema")
        committed = header.offset
        for entry in entries:
            if isinstance(entry, Commit):
                what = f"commit {entry.seq} ({entry.rows} rows)"
                yield from _range_problems(path, file, entry, entry.offset - committed, what)
            else:
                yield from _ending_problems(path, file, entry, committed)
            committed = entry.offset


def _range_problems(
    path: Path, file: BinaryIO, entry: Header | Commit, length: int, what: str
) -> Iterator[str]:
    begin = file.tell()
    hashed, left = hashlib.sha256(), length
    while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
        hashed.update(chunk)
        left -= len(chunk)
    if left:
        yield f"part {path} is cut off at byte {begin + length - left}, inside {what}"
    elif hashed.hexdigest() != entry.sha256:
        yield f"part {path} was altered: bytes {begin} to {entry.offset}, {what}, have another hash"
    file.seek(entry.offset)


def _ending_problems(path: Path, file: BinaryIO, entry: Entry, committed: int) -> Iterator[str]:
    assert isinstance(entry, Closed)
    if file.read() != END_OF_STREAM or entry.offset != committed + len(END_OF_STREAM):
        yield f"part {path} was closed at byte {entry.offset} and does not end there properly"


def _num_messages(path: Path) -> int:
    """How many whole Arrow messages a part holds, two at most: 1 is a schema alone."""
    try:
        with pa.OSFile(str(path)) as file:
            pa.ipc.read_message(file)
            try:
                pa.ipc.read_message(file)
            except (EOFError, pa.ArrowInvalid, OSError):
                return 1
            return 2
    except (EOFError, pa.ArrowInvalid, OSError):
        return 0
