"""A file system in memory that several hosts share, as unkind as real ones may be.

Knows: files, names, and what a crash takes. Refuses to know: what is in the files, whose turn it is. It
stands in for `os` under pipeline/durable.py and pipeline/store.py, so that these run as they are.

A host sees what it wrote itself at once; the others see what was forced to disk, and of the rest as much as
chance lets through. Only what was forced to disk survives a power cut for sure: a file's bytes by its own
fsync, a name by its folder's. Listings on another host may be old, a lease it did not find stays unfound
for a while. After a failed fsync, what was not on disk by then never comes there, whoever asks.
"""

from __future__ import annotations

import errno
import io
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

from pipeline import durable
from pipeline import store as store_module

# For so long a host may believe what it once saw of a folder.
STALE_S = 20.0
# A host that sees all writes at once.
EVERYWHERE = "everywhere"


@dataclass(eq=False)
class Inode:
    """data: as its writer sees it. visible: so much the other hosts see. safe: so much survives.
    lost: the last descriptor there was when an fsync failed.
    """

    host: str
    data: bytearray = field(default_factory=bytearray)
    visible: int = 0
    safe: int = 0
    links: int = 1
    lost: int | None = None


@dataclass
class _Open:
    path: str
    inode: Inode | None


class Disk:
    """step(operation, path): called before each operation; may raise. host(): who asks. clock(): now."""

    def __init__(
        self,
        chance: random.Random,
        step: Callable[[str, str], None],
        host: Callable[[], str],
        clock: Callable[[], float],
        remote: bool,
    ) -> None:
        """remote: hosts see each other's writes late."""
        self._chance = chance
        self._step = step
        self._host = host
        self._clock = clock
        self._remote = remote
        self.names: dict[str, Inode] = {}
        self.safe_names: dict[str, Inode] = {}
        self.folders: set[str] = set()
        self.safe_folders: set[str] = set()
        self._open: dict[int, _Open] = {}
        self._num_opened = 1000
        self._num_temporary = 0
        # (host, folder) -> (until when, listing); (host, path) -> until when it is not there
        self._listings: dict[tuple[str, str], tuple[float, list[str]]] = {}
        self._absent: dict[tuple[str, str], float] = {}
        disk = self

        class SimulatedPath(PurePosixPath):
            """What pipeline/ asks of a Path."""

            def exists(self) -> bool:
                return disk.exists(str(self))

            def stat(self) -> Any:
                return disk._stat(str(self))

            def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
                disk._mkdir(self)

            def unlink(self, missing_ok: bool = False) -> None:
                disk._unlink(str(self))

        self.path = SimulatedPath

    # ---------------------------------------------------------------- what crashes leave

    def cut_host(self, host: str) -> None:
        """A host loses its power. What the others saw of its files is with the server, and stays."""
        if not self._remote:
            self.cut_everything()
            return
        for inode in self._inodes():
            if inode.host == host:
                del inode.data[inode.visible :]

    def cut_everything(self) -> None:
        for inode in self._inodes():
            self._lose(inode, inode.safe)
        self._lose_names()

    def _inodes(self) -> Iterator[Inode]:
        return iter({id(inode): inode for _, inode in sorted(self.names.items())}.values())

    def _lose(self, inode: Inode, kept: int) -> None:
        tail = len(inode.data) - kept
        if tail <= 0:
            return
        how = self._chance.random()
        if how < 0.5:
            del inode.data[kept:]
        elif how < 0.75:
            del inode.data[kept + self._chance.randrange(tail + 1) :]
        else:
            # blocks come to disk in any order: a hole before bytes that are there
            begin = kept + self._chance.randrange(tail)
            inode.data[kept:begin] = bytes(begin - kept)
        inode.visible = inode.safe = len(inode.data)

    def _lose_names(self) -> None:
        for folder in sorted(self.folders - self.safe_folders):
            if self._chance.random() < 0.7:
                for path in [p for p in self.names if p.startswith(folder + "/")]:
                    del self.names[path]
                self.folders = {f for f in self.folders if f != folder and not f.startswith(folder + "/")}
        for path in sorted({*self.names, *self.safe_names}):
            now, then = self.names.get(path), self.safe_names.get(path)
            if now is not then and self._chance.random() < 0.7:
                if then is None:
                    del self.names[path]
                elif path.rpartition("/")[0] in self.folders:
                    self.names[path] = then
        self.safe_names, self.safe_folders = dict(self.names), set(self.folders)
        self._listings.clear()
        self._absent.clear()

    # ---------------------------------------------------------------- operations

    def exists(self, path: str) -> bool:
        self._step("look", path)
        there = path in self.names or path in self.folders
        key = (self._host(), path)
        if there and self._absent.get(key, 0.0) > self._clock():
            return False
        if not there and self._remote and "/leases/" in path:
            self._absent[key] = self._clock() + self._chance.uniform(0, STALE_S)
        return there

    def _stat(self, path: str) -> Any:
        inode = self._inode(path)
        return SimpleNamespace(st_size=len(self._seen(inode)), st_nlink=inode.links)

    def _mkdir(self, path: PurePosixPath) -> None:
        self._step("mkdir", str(path))
        for folder in (*reversed(path.parents), path):
            if str(folder) != "/":
                self.folders.add(str(folder))

    def _unlink(self, path: str) -> None:
        self._step("unlink", path)
        inode = self.names.pop(path, None)
        if inode is not None:
            inode.links -= 1

    def _open_file(self, path: Any, flags: int, mode: int = 0o777) -> int:
        name = str(path)
        if flags & os.O_DIRECTORY:
            return self._descriptor(name, None)
        if not flags & os.O_CREAT:
            return self._descriptor(name, self._inode(name))
        self._step("create", name)
        if name in self.names:
            raise FileExistsError(errno.EEXIST, "exists", name)
        self._require_folder(name)
        inode = Inode(self._host())
        self._add(name, inode)
        return self._descriptor(name, inode)

    def _write(self, descriptor: int, data: memoryview) -> int:
        opened = self._open[descriptor]
        inode = opened.inode
        assert inode is not None
        # a short write now and then; a full disk takes a part before it says so
        length = len(data) if self._chance.random() < 0.9 else self._chance.randrange(1, len(data) + 1)
        try:
            self._step("write", opened.path)
        except OSError:
            inode.data += data[: self._chance.randrange(len(data))]
            raise
        inode.data += data[:length]
        if not self._remote:
            inode.visible = len(inode.data)
        elif self._chance.random() < 0.3:
            inode.visible = self._chance.randint(inode.visible, len(inode.data))
        return length

    def _fsync(self, descriptor: int) -> None:
        opened = self._open[descriptor]
        if opened.inode is None:
            self._step("sync folder", opened.path)
            self._keep_names(opened.path)
            return
        inode = opened.inode
        mine = inode.host == self._host()
        try:
            self._step("sync", opened.path)
        except OSError:
            # the kernel calls the pages clean now, though they never were on disk
            if mine:
                self._drop(inode)
            raise
        if inode.lost is not None and mine:
            if descriptor <= inode.lost:
                # everybody who had the file open by then is told
                self._drop(inode)
                raise OSError(errno.EIO, "was lost", opened.path)
            return
        seen = len(self._seen(inode))
        inode.visible = max(inode.visible, seen)
        inode.safe = max(inode.safe, seen)

    def _drop(self, inode: Inode) -> None:
        inode.lost = self._num_opened if inode.lost is None else inode.lost
        if self._remote:
            # a client of a file server reads such a file anew from there
            del inode.data[inode.visible :]

    def _keep_names(self, folder: str) -> None:
        begin = folder + "/"
        for path in [p for p in self.safe_names if p.startswith(begin) and p not in self.names]:
            if "/" not in path[len(begin) :]:
                del self.safe_names[path]
        for path, inode in self.names.items():
            if path.startswith(begin) and "/" not in path[len(begin) :]:
                self.safe_names[path] = inode
        self.safe_folders |= {f for f in self.folders if f.rpartition("/")[0] == folder}

    def _replace(self, source: Any, target: Any) -> None:
        self._step("rename", str(target))
        self._add(str(target), self.names.pop(str(source)))

    def _link(self, source: Any, target: Any) -> None:
        # asking for the name anew is what makes it exclusive
        self._absent.pop((self._host(), str(target)), None)
        try:
            self._step("link", str(target))
        except TimeoutError:
            # the server did it, its answer was lost, and the client asked again
            self._link_now(str(source), str(target))
        self._link_now(str(source), str(target))

    def _link_now(self, source: str, target: str) -> None:
        if target in self.names:
            raise FileExistsError(errno.EEXIST, "exists", target)
        self._require_folder(target)
        inode = self._inode(source)
        inode.links += 1
        self._add(target, inode)

    def _listdir(self, folder: Any) -> list[str]:
        self._step("list", str(folder))
        key, begin = (self._host(), str(folder)), f"{folder}/"
        until, listing = self._listings.get(key, (0.0, []))
        if until > self._clock():
            return list(listing)
        if str(folder) not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "no folder", str(folder))
        inside = (path[len(begin) :] for path in (*self.names, *self.folders) if path.startswith(begin))
        listing = sorted({name for name in inside if "/" not in name})
        self._chance.shuffle(listing)
        if self._remote and key[0] != EVERYWHERE and self._chance.random() < 0.3:
            self._listings[key] = self._clock() + self._chance.uniform(0, STALE_S), listing
        return list(listing)

    def _read(self, path: Any, mode: str = "rb") -> io.BytesIO:
        self._step("read", str(path))
        inode = self._inode(str(path))
        file = _Reader(self._seen(inode))
        file.number = self._descriptor(str(path), inode)
        return file

    # ---------------------------------------------------------------- what they share

    def _seen(self, inode: Inode) -> bytes:
        mine = not self._remote or self._host() in (inode.host, EVERYWHERE)
        return bytes(inode.data if mine else inode.data[: inode.visible])

    def _inode(self, path: str) -> Inode:
        try:
            return self.names[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from None

    def _require_folder(self, path: str) -> None:
        folder = path.rpartition("/")[0]
        if folder not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "no folder", folder)

    def _add(self, path: str, inode: Inode) -> None:
        self.names[path] = inode
        # one's own names one sees at once
        self._listings.pop((self._host(), path.rpartition("/")[0]), None)
        self._absent.pop((self._host(), path), None)

    def _descriptor(self, path: str, inode: Inode | None) -> int:
        self._num_opened += 1
        self._open[self._num_opened] = _Open(path, inode)
        return self._num_opened

    def _mmap(self, descriptor: int, length: int, access: int) -> bytes:
        opened = self._open[descriptor]
        assert opened.inode is not None
        return self._seen(opened.inode)

    def _token(self, num_bytes: int) -> str:
        self._num_temporary += 1
        return f"{self._num_temporary:08x}"

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """While entered, pipeline/store.py and pipeline/durable.py work on this disk."""
        operations = SimpleNamespace(
            open=self._open_file,
            write=self._write,
            fsync=self._fsync,
            close=lambda descriptor: None,
            replace=self._replace,
            link=self._link,
            stat=lambda path: self._stat(str(path)),
            fstat=lambda number: SimpleNamespace(st_size=len(self._seen(self._open[number].inode))),
            listdir=self._listdir,
            strerror=os.strerror,
            path_of=lambda number: self._open[number].path,
            **{name: getattr(os, name) for name in dir(os) if name.startswith("O_")},
        )
        real = (durable.os, durable.secrets, store_module.os, store_module.mmap)
        durable.os = store_module.os = operations
        durable.secrets = SimpleNamespace(token_hex=self._token)
        store_module.mmap = SimpleNamespace(mmap=self._mmap, ACCESS_READ=1)
        store_module.open = self._read
        try:
            yield
        finally:
            durable.os, durable.secrets, store_module.os, store_module.mmap = real
            del store_module.open


class _Reader(io.BytesIO):
    number: int

    def fileno(self) -> int:
        return self.number
