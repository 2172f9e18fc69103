"""The few operations on a file system that the promise of exactly once rests on.

Knows: creating, appending, forcing to disk, renaming. Refuses to know: what is written.
Every byte that must survive a crash goes through these functions, called as `durable.write(...)`, so that
whoever replaces them here can stop, starve or kill a job at each of its steps.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class NoHardLinks(ValueError):
    """The file system cannot create a name atomically; says which key to look at."""


class FullDisk(OSError):
    """The disk (or the quota) has no room left; says which key to look at and how to go on."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.errno = number


@contextmanager
def full_disk_named(directory: Path) -> Iterator[None]:
    """Turns a full disk inside the block into a FullDisk that names `directory`."""
    try:
        yield
    except FullDisk:
        raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        why = os.strerror(error.errno)
        raise FullDisk(
            error.errno,
            f"output.dir={directory}: {why}. What was committed is safe: free some space or move the "
            "directory to a larger disk, then start the same command again",
        ) from error


def create(path: Path) -> int:
    """A new file for appending, as a descriptor. Raises FileExistsError if the name is taken."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(descriptor: int, data: bytes | memoryview) -> None:
    """Appends all of `data`."""
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(descriptor, left) :]


def fsync_file(descriptor: int) -> None:
    os.fsync(descriptor)


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory durable: a file's own fsync says nothing of its name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some network file systems have no fsync of a directory; their creates are synchronous
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.replace(source, target)


def link(source: Path, target: Path) -> None:
    """Gives a file a second name. Raises FileExistsError if that is taken: of many, one succeeds."""
    os.link(source, target)


def remove(path: Path) -> None:
    """Takes a file away, if it is there. What must be durable before is the caller's to know."""
    path.unlink(missing_ok=True)


def atomic_write(path: Path, data: bytes) -> None:
    """The whole of `data` under this name, or what was there before, whatever happens in between.

    Several processes may write the same name at once: the last rename stays.
    """
    temporary = _write_temporary(path, data)
    rename(temporary, path)
    fsync_directory(path.parent)


def atomic_create(path: Path, data: bytes) -> bool:
    """The whole of `data` under a new name, durable. False if the name is taken: of many, one succeeds.

    Needs no lock, and is atomic on network file systems too. Raises NoHardLinks where there are none.
    """
    temporary = _write_temporary(path, data)
    try:
        link(temporary, path)
    except FileExistsError:
        # a network file system may have lost the reply to a link that succeeded, and asked again
        if os.stat(temporary).st_nlink < 2:
            return False
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise NoHardLinks(
                f"output.dir: the file system of {path.parent} cannot create a second name for a file "
                f"({os.strerror(error.errno)}), by which workers agree on who does what: choose an "
                "output.dir on another one (local disk, NFS, Lustre, GPFS …)"
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(path.parent)
    return True


def _write_temporary(path: Path, data: bytes) -> Path:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = create(temporary)
    try:
        write(descriptor, data)
        fsync_file(descriptor)
    except OSError:
        # a full disk must not stay full of what nobody will read
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return temporary


class DurableFile:
    """A new file for writers that want a file object; `close` returns when the bytes are on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.closed = False
        self._descriptor = create(path)

    def write(self, data: bytes | memoryview) -> int:
        write(self._descriptor, data)
        num_bytes = memoryview(data).nbytes
        self.size += num_bytes
        return num_bytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            try:
                fsync_file(self._descriptor)
            finally:
                os.close(self._descriptor)

    def abandon(self) -> None:
        """Closes without promising anything: the file is about to be thrown away."""
        if not self.closed:
            self.closed = True
            os.close(self._descriptor)

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False
