"""The seam between the protocol and a file system: all that workers, leases, parts and journals do to files.

Knows: names and bytes, and whether they are files or a remote store's objects. Refuses to know: what they
mean. The protocol takes a Store as a value, so that the same code runs on real files, where each durable
step goes through `durable.py`, on objects, and on simulated files.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pipeline import durable

# As pathlib writes it, too: with one slash.
_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+):/+(.*)$")


class AppendFile(Protocol):
    """A new file that one process appends to."""

    def write(self, data: bytes | memoryview) -> None: ...

    def sync(self) -> None:
        """Makes the bytes so far durable."""

    def sync_name(self) -> None:
        """Makes the file's name durable."""

    def close(self) -> None: ...


class Store(Protocol):
    """Files as the protocol uses them. Whatever does not say "durable" may be lost in a power cut."""

    def names(self, folder: Path) -> list[str]:
        """Names in a folder, in any order, without temporary ones; none if there is no such folder."""

    def exists(self, path: Path) -> bool: ...

    def size(self, path: Path) -> int:
        """Raises FileNotFoundError."""

    def read(self, path: Path, start: int = 0, length: int | None = None) -> bytes:
        """Bytes from `start` on, fewer than `length` at the file's end. Raises FileNotFoundError."""

    def view(self, path: Path) -> bytes | mmap.mmap:
        """The file as it is now, not copied. Raises FileNotFoundError."""

    def make_folder(self, folder: Path) -> None:
        """So that `append` finds it; it may be there."""

    def create_new(self, path: Path, data: bytes) -> bool:
        """Atomic and durable; False if the name is taken: of many who try at once, one succeeds."""

    def replace(self, path: Path, data: bytes) -> None:
        """Atomic and durable."""

    def settle(self, path: Path) -> None:
        """Makes durable what can be seen of a file that another process writes."""

    def append(self, path: Path) -> AppendFile:
        """A new file. Raises FileExistsError."""


class _AppendFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = durable.create(path)

    def write(self, data: bytes | memoryview) -> None:
        durable.write(self._descriptor, data)

    def sync(self) -> None:
        durable.fsync_file(self._descriptor)

    def sync_name(self) -> None:
        durable.fsync_directory(self._path.parent)

    def close(self) -> None:
        os.close(self._descriptor)


class FileStore:
    """Store of real files."""

    def __init__(self) -> None:
        # folders whose own names are known to be durable
        self._folders: set[Path] = set()

    def names(self, folder: Path) -> list[str]:
        try:
            return [name for name in os.listdir(folder) if not name.startswith(".")]
        except FileNotFoundError:
            return []

    def exists(self, path: Path) -> bool:
        return path.exists()

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def read(self, path: Path, start: int = 0, length: int | None = None) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read() if length is None else file.read(length)

    def view(self, path: Path) -> bytes | mmap.mmap:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                # nothing cannot be mapped
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # also if another process made it: it may not have come to this yet
        durable.fsync_directory(folder.parent)

    def create_new(self, path: Path, data: bytes) -> bool:
        self._require_folder(path.parent)
        return durable.atomic_create(path, data)

    def replace(self, path: Path, data: bytes) -> None:
        self._require_folder(path.parent)
        durable.atomic_write(path, data)

    def settle(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            durable.fsync_file(descriptor)
        finally:
            os.close(descriptor)

    def append(self, path: Path) -> AppendFile:
        return _AppendFile(path)

    def _require_folder(self, folder: Path) -> None:
        if folder not in self._folders:
            self.make_folder(folder)
            self._folders.add(folder)


def is_remote(path: str | Path) -> bool:
    """Whether a path is a URL, `s3://bucket/job`, or what pathlib makes of one."""
    return _URL.match(str(path)) is not None


def absolute(path: str) -> str:
    return path if is_remote(path) else os.path.abspath(path)


def local_folder(path: str | Path, stage_dir: str | None = None) -> Path:
    """Where a process keeps what it needs of a job on its own disk: the job's directory, if that is local."""
    found = _URL.match(str(path))
    if found is None:
        return Path(path)
    url = f"{found[1]}://{found[2].strip('/')}"
    stage = Path(stage_dir or f"{tempfile.gettempdir()}/tokenmill-{os.getuid()}")
    return stage / hashlib.sha256(url.encode()).hexdigest()[:16]


def open_store(
    path: str | Path, storage_options: Mapping[str, Any] | None = None, stage_dir: str | None = None
) -> Store:
    """The store in which a job's directory lies. storage_options: as fsspec takes them, for a URL.

    Raises ValueError if there is no such store, or what it needs is not installed.
    """
    found = _URL.match(str(path))
    if found is None:
        return FileStore()
    if found[1] in ("file", "local"):
        raise ValueError(f"output.dir={path}: give a local directory by its path, without {found[1]}:")
    # here: fsspec is nothing for a worker on local files
    from pipeline.stores.remote import RemoteStore

    return RemoteStore.of(f"{found[1]}://{found[2]}", storage_options or {}, local_folder(path, stage_dir))


def require_exclusive_names(store: Store, job: Path) -> None:
    """Raises ValueError, naming output.dir and the remedy, if `create_new` keeps no promise.

    A file system without hard links says so at its first lease; an object store would overwrite.
    """
    if is_remote(job):
        from pipeline.stores.conditional import require_conditional_create
        from pipeline.stores.remote import RemoteStore

        assert isinstance(store, RemoteStore)
        require_conditional_create(store, job)
