"""A Store of objects: what `output.dir=s3://…` and other URLs of fsspec are written to and read from.

Knows: fsspec, and that nothing can be appended to an object. A file that grows is a folder of segments,
immutable objects named by the byte at which they begin, one for each sync; a name is created by the
server's conditional put. Refuses to know: what the bytes mean.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import fsspec
import fsspec.core

from pipeline.stores.patience import Patience
from pipeline.stores.segments import Segment, SegmentFile, in_order

T = TypeVar("T")

# How long a server may be away before a worker gives up.
PATIENCE_S = 120.0
_COPY_BYTES = 32 * 2**20


class RemoteStore:
    """Store of objects. One instance may be used by several threads.

    Raises StoreUnreachable once the server has not answered for patience_s seconds.
    """

    def __init__(
        self, filesystem: fsspec.AbstractFileSystem, stage: Path, patience_s: float = PATIENCE_S
    ) -> None:
        """stage: a local folder for bytes on their way up, and for copies of files that are viewed."""
        self._fs = filesystem
        self._stage = stage
        self._patience = Patience(patience_s)
        # files known to be segments: no request is spent on finding it out again
        self._grown: set[Path] = set()

    @classmethod
    def of(cls, url: str, storage_options: Mapping[str, Any], stage: Path) -> RemoteStore:
        """Raises ValueError if there is no such kind of store, or what it needs is not installed."""
        # what others write must be seen at once
        options = {**storage_options, "use_listings_cache": False}
        try:
            filesystem, _ = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError, TypeError) as error:
            hint = ": pip install 'tokenmill[s3]'" if url.startswith("s3:") else ""
            raise ValueError(f"output.dir={url} cannot be opened ({error}){hint}") from error
        return cls(filesystem, stage)

    def names(self, folder: Path) -> list[str]:
        try:
            found = self._ask(folder, lambda key: self._fs.ls(key, detail=False))
        except FileNotFoundError:
            return []
        names = {_last_of(name) for name in found if not self._is_key(name, folder)}
        return [name for name in names if not name.startswith(".")]

    def exists(self, path: Path) -> bool:
        try:
            # not fsspec's `exists`, which may take a server that does not answer for a no
            self._ask(path, self._fs.info)
        except FileNotFoundError:
            return False
        return True

    def size(self, path: Path) -> int:
        segments = self._segments(path)
        if segments is None:
            return int(self._ask(path, self._fs.info)["size"])
        return segments[-1].stop

    def read(self, path: Path, start: int = 0, length: int | None = None) -> bytes:
        stop = None if length is None else start + length
        if path not in self._grown:
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                return self._object(path)[start:stop]
        segments = self._segments(path)
        if segments is None:
            return self._object(path)[start:stop]
        self._grown.add(path)
        size = segments[-1].stop
        return self._join(path, segments, start, size if stop is None else min(stop, size))

    def view(self, path: Path) -> bytes | mmap.mmap:
        segments = self._segments(path)
        if segments is None:
            return self._object(path)
        with self._unnamed_file() as copy:
            self._copy(path, segments, copy)
            copy.flush()
            return mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ)

    def make_folder(self, folder: Path) -> None:
        """There are no folders here, only names with slashes in them."""

    def create_new(self, path: Path, data: bytes) -> bool:
        try:
            self._ask(path, lambda key: self._fs.pipe_file(key, data, mode="create"))
        except FileExistsError:
            # the reply to a request that succeeded may have been lost, and the request repeated
            return self._object(path) == data
        return True

    def replace(self, path: Path, data: bytes) -> None:
        self._ask(path, lambda key: self._fs.pipe_file(key, data))

    def settle(self, path: Path) -> None:
        """What can be seen of an object is durable."""

    def append(self, path: Path) -> SegmentFile:
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        return SegmentFile(lambda name, data: self.put(path / name, data), self._unnamed_file())

    def put(self, path: Path, data: bytes) -> None:
        """Writes an object that nobody else writes, and looks whether it is there, whole."""

        def put_and_look(key: str) -> None:
            self._fs.pipe_file(key, data)
            size = self._fs.info(key)["size"]
            if size != len(data):
                raise OSError(errno.EIO, f"{size} of {len(data)} bytes arrived", str(path))

        self._ask(path, put_and_look)

    def upload(self, source: Path, path: Path) -> None:
        """A local file as one object, of any size."""
        self._ask(path, lambda key: self._fs.put_file(str(source), key))

    def download(self, path: Path, target: Path) -> None:
        """A whole file, as it is now, into a new local one."""
        segments = self._segments(path)
        if segments is None:
            self._ask(path, lambda key: self._fs.get_file(key, str(target)))
            return
        with open(target, "xb") as file:
            self._copy(path, segments, file)

    def tree(self, folder: Path) -> list[str]:
        """All objects at any depth below a folder, named from there, sorted."""
        key = self._key(folder).rstrip("/") + "/"
        found = self._ask(folder, self._fs.find)
        return sorted(str(name).strip("/").removeprefix(key.lstrip("/")) for name in found)

    def remove(self, path: Path) -> None:
        """Takes away a file, or a folder with all that is in it; nothing if there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._ask(path, lambda key: self._fs.rm(key, recursive=True))

    def _object(self, path: Path) -> bytes:
        return bytes(self._ask(path, self._fs.cat_file))

    def _segments(self, path: Path) -> list[Segment] | None:
        """In order, at least one; None if the file is one plain object.

        Raises FileNotFoundError, OSError if one is missing between others.
        """
        found = self._ask(path, lambda key: self._fs.ls(key, detail=True))
        if any(self._is_key(entry["name"], path) and entry["type"] == "file" for entry in found):
            return None
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return in_order([(_last_of(entry["name"]), int(entry["size"])) for entry in found], url_of(path))

    def _copy(self, path: Path, segments: list[Segment], file: IO[bytes]) -> None:
        size = segments[-1].stop
        for begin in range(0, size, _COPY_BYTES):
            file.write(self._join(path, segments, begin, min(begin + _COPY_BYTES, size)))

    def _join(self, path: Path, segments: list[Segment], start: int, stop: int) -> bytes:
        """Bytes start to stop of the file that the segments make up."""
        inside = [segment for segment in segments if segment.start < stop and segment.stop > start]
        if not inside:
            return b""
        starts = [max(start - segment.start, 0) for segment in inside]
        stops = [min(stop, segment.stop) - segment.start for segment in inside]

        def read_all(key: str) -> bytes:
            names = [f"{key}/{segment.name}" for segment in inside]
            data = b"".join(self._fs.cat_ranges(names, starts, stops, on_error="raise"))
            if len(data) != stop - start:
                raise OSError(errno.EIO, f"{len(data)} of {stop - start} bytes came", str(path))
            return data

        return self._ask(path, read_all)

    def _unnamed_file(self) -> IO[bytes]:
        self._stage.mkdir(parents=True, exist_ok=True)
        # a killed process leaves nothing behind
        return tempfile.TemporaryFile(dir=self._stage)

    def _is_key(self, name: str, path: Path) -> bool:
        """Whether a listing's entry is the very thing that was listed."""
        return name.strip("/") == self._key(path).strip("/")

    def _key(self, path: Path) -> str:
        return str(self._fs._strip_protocol(url_of(path)))

    def _ask(self, path: Path, request: Callable[[str], T]) -> T:
        key = self._key(path)
        return self._patience.ask(url_of(path), lambda: request(key))


def url_of(path: Path) -> str:
    # pathlib makes one slash of a URL's two
    scheme, _, rest = str(path).partition(":/")
    return f"{scheme}://{rest.lstrip('/')}"


def _last_of(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]
