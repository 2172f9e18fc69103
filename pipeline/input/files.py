"""Files behind paths, globs, directories and URLs, and what sources made of files share.

Knows: fsspec, content hashes, how to index many files at once and compare their schemas.
Refuses to know: formats. A format subclasses `FileSource` and says how one file is scanned and how
one of its blocks is read.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import fsspec
import fsspec.core
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from pipeline.input.source import BATCH_ROWS, Block, InputFile, InputIndex, input_file

# Bytes hashed at each end of a file: enough to hold a Parquet footer's schema and statistics.
DIGEST_BYTES = 64 * 1024
# Files opened at once while scanning: remote file systems answer slowly, not narrowly.
SCAN_THREADS = 16
# Differences shown before a message is cut short.
SHOWN = 10


class FoundFile(NamedTuple):
    """path: absolute, or a URL that opens again. size: in bytes."""

    path: str
    size: int


class Scanned(NamedTuple):
    """What one file holds: its blocks as (number of rows, locator), and its columns."""

    blocks: list[tuple[int, int | None]]
    schema: pa.Schema


@contextmanager
def reading(path: str, kind: str) -> Iterator[None]:
    """Turn whatever goes wrong while a file is read into one sentence that names the file."""
    try:
        yield
    except (OSError, EOFError, pa.ArrowException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} cannot be read as {kind}: {reason}") from error


def open_input(path: str, storage_options: Mapping[str, Any], memory_map: bool = False) -> pa.NativeFile:
    """The file, for reading at any position. Local files are read by Arrow itself."""
    fs, inner = fsspec.core.url_to_fs(path, **storage_options)
    if isinstance(fs, LocalFileSystem):
        return pa.memory_map(inner) if memory_map else pa.OSFile(inner)
    # Formats ask for the ranges they need, so read-ahead would fetch bytes that nobody wants.
    file = _RemoteFile(fs.open(inner, "rb", cache_type="none"), mode="r")
    file.filesystem = fs
    return file


class _RemoteFile(pa.PythonFile):
    """Keeps its file system: an archive closes itself, and its members, once nobody holds it."""

    filesystem: fsspec.AbstractFileSystem


def content_digest(file: pa.NativeFile) -> str:
    """A hash of the file's head, tail and size."""
    size = file.size()
    head = file.read_at(min(DIGEST_BYTES, size), 0)
    tail_start = max(len(head), size - DIGEST_BYTES)
    tail = file.read_at(size - tail_start, tail_start)
    return hashlib.sha256(b"%d:" % size + head + tail).hexdigest()[:32]


def find_files(path: Any, suffixes: tuple[str, ...], storage_options: Mapping[str, Any]) -> list[FoundFile]:
    """The files that `source.path` means, sorted, each once.

    path: a file, directory, glob or URL, or a list of them. A directory gives its files with one of
    `suffixes`, at any depth, but none whose name, or whose folder's name, begins with `.` or `_`.
    """
    wanted = [path] if isinstance(path, str) or not isinstance(path, Iterable) else list(path)
    if not wanted:
        raise ValueError("source.path=[] names no file: give a path, a glob, a directory or a list of them")
    found: dict[str, int] = {}
    for one in map(str, wanted):
        try:
            matches = _matches(one, suffixes, storage_options)
        except (OSError, ImportError, ValueError) as error:
            raise ValueError(f"source.path={one} cannot be opened: {error}") from error
        if not matches:
            raise ValueError(
                f"source.path={one} matches no file: give an existing file, a glob, or a directory "
                f"with files ending in {', '.join(suffixes)}"
            )
        found.update(matches)
    return [FoundFile(name, size) for name, size in sorted(found.items())]


def _matches(url: str, suffixes: tuple[str, ...], storage_options: Mapping[str, Any]) -> dict[str, int]:
    fs, inner = fsspec.core.url_to_fs(url, **storage_options)
    if fs.isfile(inner):
        return {_full_name(fs, inner, url): fs.info(inner)["size"]}
    if fs.isdir(inner):
        files = fs.find(inner, detail=True)
        prefix = len(inner.rstrip("/")) + 1 if inner.strip("/") else 0
        named = {n: i for n, i in files.items() if n.endswith(suffixes) and not _hidden(n[prefix:])}
    elif fsspec.core.has_magic(inner):
        files = fs.glob(inner, detail=True)
        parts = inner.split("/")
        fixed = next(place for place, part in enumerate(parts) if fsspec.core.has_magic(part))
        # A glob that spells out a hidden name asks for it.
        asked = _hidden("/".join(parts[fixed:]))
        named = {
            n: i
            for n, i in files.items()
            if i["type"] == "file" and (asked or not _hidden("/".join(n.split("/")[fixed:])))
        }
    else:
        return {}
    return {_full_name(fs, name, url): info["size"] for name, info in named.items()}


def _hidden(name: str) -> bool:
    return any(part[:1] in (".", "_") for part in name.split("/"))


def _full_name(fs: fsspec.AbstractFileSystem, inner: str, url: str) -> str:
    """The name under which a file found through `url` opens again."""
    outer, chained, rest = url.partition("::")
    if not chained:
        return inner if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(inner)
    if "://" in outer:  # an archive: zip://*.parquet::s3://bucket/all.zip
        return f"{outer.partition('://')[0]}://{inner.lstrip('/')}::{rest}"
    protocol, given, _ = rest.partition("://")  # a cache: simplecache::s3://bucket/*.parquet
    return f"{outer}::{protocol if given else 'file'}://{inner}"


class FileSource(ABC):
    """A source made of files. Subclasses say what one file holds and how a block is read."""

    kind: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        path: Any,
        storage_options: Mapping[str, Any] | None = None,
        index: InputIndex | None = None,
        allow_append: bool = False,
        metadata: Mapping[str, str] | None = None,
    ):
        self.path = path
        self.storage_options = dict(storage_options or {})
        self.index = index
        self.allow_append = allow_append
        self.metadata = dict(metadata or {})

    @abstractmethod
    def scan_file(self, file: pa.NativeFile, path: str) -> Scanned: ...

    @abstractmethod
    def read_block(self, file: InputFile, block: Block, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The block's rows in batches of any length, with at least `columns`."""

    def scan(self) -> InputIndex:
        known = self.index
        if known is not None and not self.allow_append:
            return known
        files = list(known.files) if known else []
        schema = known.schema if known else None
        already = {file.path for file in files}
        new = [file for file in self._find() if file.path not in already]
        with ThreadPoolExecutor(SCAN_THREADS) as pool:
            for found, (scanned, digest) in zip(new, pool.map(self._scan, new), strict=True):
                schema = self.unite(schema, scanned.schema, found.path)
                files.append(input_file(len(files), found.path, found.size, digest, scanned.blocks))
        assert schema is not None  # find_files never comes back empty-handed
        self.index = InputIndex(tuple(files), schema, known.metadata if known else self.metadata)
        return self.index

    def check(self, index: InputIndex) -> None:
        found = {file.path: file.size for file in self._find()}
        known = {file.path: file for file in index.files}
        differences = [f"{path} is missing" for path in known if path not in found]
        if not self.allow_append:
            differences += [f"{path} is new" for path in found if path not in known]
        for path, file in known.items():
            if path in found and found[path] != file.size:
                differences.append(f"{path} had {file.size} bytes and has {found[path]}")
        same_size = [file for path, file in known.items() if found.get(path) == file.size]
        with ThreadPoolExecutor(SCAN_THREADS) as pool:
            digests = pool.map(self._digest, [file.path for file in same_size])
            changed = [file for file, digest in zip(same_size, digests, strict=True) if digest != file.digest]
        differences += [f"{file.path} has other content" for file in changed]
        refuse(differences)

    def read(self, block: Block, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        index = self.scan() if self.index is None else self.index
        file = index.files[block.file]
        schema = pa.schema([self.field(index.schema, name, file.path) for name in columns])
        num_rows = 0
        with reading(file.path, self.kind):
            for batch in self.read_block(file, block, columns):
                num_rows += batch.num_rows
                yield from in_pieces(batch, schema)
        if num_rows != block.num_rows:
            raise ValueError(
                f"{file.path} has {num_rows} rows from row {block.first_row} on where {block.num_rows} were "
                "counted: it changed since the job started; restore it or use another output.dir"
            )

    def unite(self, schema: pa.Schema | None, other: pa.Schema, path: str) -> pa.Schema:
        """The schema of all files so far and one more. Raises ValueError if a column differs."""
        if schema is None:
            repeated = sorted({name for name in other.names if other.names.count(name) > 1})
            if repeated:
                raise ValueError(
                    f"{path} has column {', '.join(repeated)} more than once: rename one of them"
                )
            # A column without nulls in one file may have some in the next.
            return pa.schema([column.with_nullable(True) for column in other])
        for name in dict.fromkeys([*schema.names, *other.names]):
            before = schema.field(name).type if name in schema.names else "absent"
            here = other.field(name).type if name in other.names else "absent"
            if before != here:
                raise ValueError(
                    f"{path} has column {name} as {here}, the files before it as {before}: "
                    "convert it, or leave it out of source.path"
                )
        return schema

    def field(self, schema: pa.Schema, name: str, path: str) -> pa.Field:
        if name not in schema.names:
            raise ValueError(f"{path} has no column {name}: its columns are {', '.join(schema.names)}")
        return schema.field(name)

    def open(self, path: str, memory_map: bool = False) -> pa.NativeFile:
        return open_input(path, self.storage_options, memory_map)

    def _find(self) -> list[FoundFile]:
        return find_files(self.path, self.suffixes, self.storage_options)

    def _scan(self, found: FoundFile) -> tuple[Scanned, str]:
        with reading(found.path, self.kind), self.open(found.path) as file:
            return self.scan_file(file, found.path), content_digest(file)

    def _digest(self, path: str) -> str:
        with reading(path, self.kind), self.open(path) as file:
            return content_digest(file)


def refuse(differences: list[str]) -> None:
    """Raise ValueError if the input is no longer what it was."""
    if differences:
        more = len(differences) - SHOWN
        shown = "; ".join(differences[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise ValueError(
            f"the input changed since the job started: {shown}. Restore it, or use another output.dir"
        )


def in_pieces(batch: pa.RecordBatch, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The columns of `schema`, in batches of at most BATCH_ROWS rows, without copying."""
    # Without columns, only select() keeps the number of rows.
    chosen = batch.select(schema.names).replace_schema_metadata(None)
    if schema.names:
        chosen = pa.RecordBatch.from_arrays(chosen.columns, schema=schema)
    for start in range(0, batch.num_rows, BATCH_ROWS):
        yield chosen.slice(start, BATCH_ROWS)
