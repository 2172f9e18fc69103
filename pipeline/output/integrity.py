"""Whether the files of a job are whole: parts against their journals, shards against their records.

Knows: hashes, sizes, names, whose job a part belongs to. Refuses to know: what the rows should be (that is
`verify.py`), who may write (`lease_check.py`).
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from pipeline.output import journal
from pipeline.output.fingerprint import difference
from pipeline.output.journal import Closed, Commit, Entry, Header
from pipeline.output.layout import PUBLISHED, journal_names, journal_path, part_names, part_path
from pipeline.output.part import END_OF_STREAM
from pipeline.output.progress import JobDirectory
from pipeline.output.published import Published
from pipeline.output.schema import PROVENANCE
from pipeline.store import Store

_CHUNK_BYTES = 2**20


def file_problems(directory: JobDirectory, published: Published) -> Iterator[str]:
    """What is wrong with parts, journals and published shards, a line each. Reads every byte once."""
    job, store = directory.path, directory.store
    journals = journal_names(job, store)
    for name in journals:
        gone = published.deleted.get(name)
        yield from part_problems(directory, name, None if gone is None else gone.size)
    for name in sorted({*part_names(job, store)}.difference(journals)):
        # a kill between a part's creation and its journal's leaves a schema and no rows: harmless
        if _num_messages(store.view(part_path(job, name))) > 1:
            yield f"journal {journal_path(job, name)} is missing, and part {name} holds rows"
    yield from _shard_problems(store, published)


def part_problems(directory: JobDirectory, name: str, deleted_size: int | None = None) -> Iterator[str]:
    """What is wrong with one part. deleted_size: so many bytes were committed when it was deleted."""
    path = part_path(directory.path, name)
    try:
        yield from _part_problems(directory, name, path, deleted_size)
    except ValueError as error:
        yield str(error)
    except OSError as error:
        yield f"part {path} cannot be read: {error}"


def _part_problems(directory: JobDirectory, name: str, path: Path, deleted_size: int | None) -> Iterator[str]:
    job, store = directory.path, directory.store
    entries = journal.read(journal_path(job, name), store)
    header = next(entries, None)
    if header is None:
        if store.exists(path) and _num_messages(store.view(path)) > 1:
            yield f"{journal_path(job, name)}, line 1: the header is torn, but {path} holds rows"
        return
    if not isinstance(header, Header) or header.part != name:
        yield f"{journal_path(job, name)}, line 1: is not the header of part {name}"
        return
    is_there = store.exists(path)
    if header.fingerprint != directory.plan.digest:
        yield _other_job(directory, path, header, is_there)
    if is_there:
        yield from _byte_problems(path, store.view(path), header, entries)
        return
    if deleted_size is None:
        yield f"part {path} is missing"
        return
    committed = header.offset
    for entry in entries:
        committed = entry.offset if isinstance(entry, Commit) else committed
    if committed != deleted_size:
        yield f"part {path} was deleted at byte {deleted_size}, its journal goes on to {committed}"


def _byte_problems(
    path: Path, data: bytes | mmap.mmap, header: Header, entries: Iterator[Entry]
) -> Iterator[str]:
    yield from _range_problems(path, data, 0, header, "its schema")
    committed = header.offset
    for entry in entries:
        if isinstance(entry, Commit):
            what = f"commit {entry.seq} ({entry.rows} rows)"
            yield from _range_problems(path, data, committed, entry, what)
        else:
            assert isinstance(entry, Closed)
            if data[committed:] != END_OF_STREAM or entry.offset != committed + len(END_OF_STREAM):
                yield f"part {path} was closed at byte {entry.offset} and does not end there properly"
        committed = entry.offset


def _range_problems(
    path: Path, data: bytes | mmap.mmap, begin: int, entry: Header | Commit, what: str
) -> Iterator[str]:
    if len(data) < entry.offset:
        yield f"part {path} is cut off at byte {max(begin, len(data))}, inside {what}"
    elif _sha256(data, begin, entry.offset) != entry.sha256:
        yield f"part {path} was altered: bytes {begin} to {entry.offset}, {what}, have another hash"


def _other_job(directory: JobDirectory, path: Path, header: Header, is_there: bool) -> str:
    """In what the job that made a part differs from this one, as far as the part tells."""
    mine, theirs = directory.plan.fingerprint, None
    if is_there:
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(directory.store.view(path)))
            theirs = json.loads(json.loads((schema.metadata or {})[PROVENANCE])["settings"])
        except (KeyError, ValueError, TypeError, EOFError, pa.ArrowInvalid):
            theirs = None
    what = f"fingerprint {header.fingerprint}, not {directory.plan.digest}"
    lines = difference(mine, theirs) if isinstance(theirs, dict) else []
    return f"part {path} belongs to another job ({'; '.join([what, *lines])})"


def _shard_problems(store: Store, published: Published) -> Iterator[str]:
    for found in published.ranges.values():
        for shard in (shard for shards in found.shards.values() for shard in shards):
            path = published.job / PUBLISHED / shard.name
            try:
                data = store.view(path)
            except OSError as error:
                yield f"shard {path} cannot be read: {error}"
                continue
            if len(data) != shard.size:
                yield f"shard {path} has {len(data)} bytes, its record says {shard.size}"
            elif _sha256(data, 0, shard.size) != shard.sha256:
                yield f"shard {path} was altered: it has another hash than its record says"


def sha256_of(store: Store, path: Path, size: int | None = None) -> str:
    """Of a file, or of its first `size` bytes. Raises FileNotFoundError."""
    data = store.view(path)
    return _sha256(data, 0, len(data) if size is None else size)


def _sha256(data: bytes | mmap.mmap, begin: int, end: int) -> str:
    hashed = hashlib.sha256()
    # in pieces: nobody needs all of a part in memory
    for place in range(begin, end, _CHUNK_BYTES):
        hashed.update(data[place : min(place + _CHUNK_BYTES, end)])
    return hashed.hexdigest()


def _num_messages(data: bytes | mmap.mmap) -> int:
    """How many whole Arrow messages a part holds, two at most: 1 is a schema alone."""
    try:
        file = pa.BufferReader(pa.py_buffer(data))
        pa.ipc.read_message(file)
        try:
            pa.ipc.read_message(file)
        except (EOFError, pa.ArrowInvalid, OSError):
            return 1
        return 2
    except (EOFError, pa.ArrowInvalid, OSError):
        return 0
