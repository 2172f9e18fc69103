"""Objects behave as files do, grow by whole objects, and survive a server that comes and goes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from s3_server import CutOff, LostReply, Overloaded, S3Server

from pipeline.store import FileStore, Store, is_remote, local_folder, open_store
from pipeline.stores.conditional import NoConditionalCreate, require_conditional_create
from pipeline.stores.patience import StoreUnreachable
from pipeline.stores.remote import RemoteStore


def s3_store(s3: S3Server, stage: Path, patience_s: float = 20.0) -> RemoteStore:
    """With a client that leaves it to us to ask again."""
    filesystem = fsspec.filesystem(
        "s3", **s3.options, use_listings_cache=False, config_kwargs={"retries": {"total_max_attempts": 1}}
    )
    filesystem.retries = 1
    return RemoteStore(filesystem, stage, patience_s)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder of fsspec's memory, as pathlib writes its URL."""
    name = f"/job-{secrets.token_hex(4)}"
    yield Path(f"memory:/{name}")
    if MemoryFileSystem().exists(name):
        MemoryFileSystem().rm(name, recursive=True)


@pytest.fixture(params=["files", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Store, Path]:
    """A store of each kind, and a job's directory in it."""
    if request.param == "files":
        return FileStore(), tmp_path / "job"
    if request.param == "memory":
        path: Path = request.getfixturevalue("memory")
        return open_store(path, stage_dir=str(tmp_path)), path
    s3: S3Server = request.getfixturevalue("s3")
    return s3_store(s3, tmp_path), Path(f"s3://{s3.bucket}/job")


def test_every_store_keeps_the_contract(place: tuple[Store, Path]) -> None:
    store, job = place
    folder, file = job / "leases" / "00000", job / "leases" / "00000" / "00000001.0"
    assert store.names(folder) == [] and not store.exists(file)
    for reading in (store.size, store.read, store.view):
        with pytest.raises(FileNotFoundError):
            reading(file)
    assert store.create_new(file, b"first")
    assert not store.create_new(file, b"second")
    assert store.create_new(folder / "00000001.10", b"")
    assert (store.read(file), store.size(file), bytes(store.view(file))) == (b"first", 5, b"first")
    assert sorted(store.names(folder)) == ["00000001.0", "00000001.10"]
    assert store.names(job / "leases") == ["00000"]
    store.replace(file, b"longer than before")
    assert store.read(file, 7) == b"than before" and store.read(file, 7, 4) == b"than"
    assert store.read(file, 7, 100) == b"than before" and store.read(file, 18) == b""
    store.settle(file)


def test_every_store_lets_files_grow(place: tuple[Store, Path]) -> None:
    store, job = place
    path = job / "parts" / "w0.1-00000.arrow"
    store.make_folder(job / "parts")
    with pytest.raises(FileNotFoundError):
        store.read(path)
    file = store.append(path)
    pieces = [b"schema", b"0123456789", b"abc", b"x" * 5000]
    for number, piece in enumerate(pieces):
        file.write(memoryview(piece))
        file.sync()
        file.sync_name()
        so_far = b"".join(pieces[: number + 1])
        assert store.exists(path) and store.size(path) == len(so_far)
        assert store.read(path) == so_far == bytes(store.view(path))
    file.close()
    whole = b"".join(pieces)
    for start in (0, 3, 6, 10, 16, 5018, 5019, 6000):
        assert store.read(path, start) == whole[start:]
        assert store.read(path, start, 9) == whole[start : start + 9]
    assert store.names(job / "parts") == [path.name]
    with pytest.raises(FileExistsError):
        store.append(path)


def test_a_sync_is_one_object_and_what_was_not_synced_is_nowhere(memory: Path, tmp_path: Path) -> None:
    store = open_store(memory, stage_dir=str(tmp_path))
    path = memory / "journal" / "w0-00000.jsonl"
    file = store.append(path)
    file.write(b"one")
    assert not store.exists(path)
    file.sync()
    file.sync()
    file.write(b"two")
    file.write(b"three")
    assert store.read(path) == b"one"
    file.sync()
    names = [name.rpartition("/")[2] for name in MemoryFileSystem().find(str(path)[len("memory:") :])]
    assert names == ["000000000000000", "000000000000003"]
    # nothing of it has a name on this machine, so that a killed worker leaves nothing behind
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]


def test_an_object_that_is_missing_between_others_is_no_shorter_file(memory: Path, tmp_path: Path) -> None:
    store = open_store(memory, stage_dir=str(tmp_path))
    path = memory / "parts" / "w0-00000.arrow"
    file = store.append(path)
    for piece in (b"one", b"two", b"three"):
        file.write(piece)
        file.sync()
    assert isinstance(store, RemoteStore)
    store.remove(path / "000000000000003")
    for reading in (store.read, store.size, store.view):
        with pytest.raises(OSError, match="begins at byte 3"):
            reading(path)


def test_of_many_who_create_a_name_on_s3_one_succeeds(s3: S3Server, tmp_path: Path) -> None:
    store, path = s3_store(s3, tmp_path), Path(f"s3://{s3.bucket}/job/leases/00000/00000007.0")
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda number: store.create_new(path, b"%d" % number), range(8)))
    assert won.count(True) == 1
    assert store.read(path) == b"%d" % won.index(True)


def once(
    error: Exception, method: str, ending: str, times: int = 1
) -> tuple[Callable[[str, str], None], list[str]]:
    """A fault for the first requests of a kind, and the list of the keys that it hit."""
    hit: list[str] = []

    def watch(what: str, key: str) -> None:
        if what == method and key.endswith(ending) and len(hit) < times:
            hit.append(key)
            raise error

    return watch, hit


@pytest.mark.parametrize(
    "fault", [CutOff(), LostReply(), Overloaded()], ids=lambda fault: type(fault).__name__
)
def test_a_connection_that_breaks_loses_and_doubles_nothing(
    fault: Exception, s3: S3Server, tmp_path: Path
) -> None:
    store, job = s3_store(s3, tmp_path), Path(f"s3://{s3.bucket}/job")
    content = secrets.token_bytes(300_000)
    file = store.append(job / "parts" / "w0-00000.arrow")
    file.write(content)
    s3.watch, hit = once(fault, "PUT", "000000000000000", times=2)
    file.sync()
    assert len(hit) == 2 and store.read(job / "parts" / "w0-00000.arrow") == content
    s3.watch, hit = once(fault, "PUT", "00000003.0")
    lease = job / "leases" / "00000" / "00000003.0"
    # also if the reply to the request that made it was lost
    assert store.create_new(lease, b"mine") and hit
    assert not store.create_new(lease, b"yours") and store.read(lease) == b"mine"


def test_an_object_that_did_not_arrive_whole_is_sent_again(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sent = open_store(memory, stage_dir=str(tmp_path)), list[bytes]()
    real = MemoryFileSystem.pipe_file

    def halve_the_first(self: MemoryFileSystem, path: str, value: bytes, **kwargs: object) -> None:
        sent.append(value)
        real(self, path, value[: len(value) // 2] if len(sent) == 1 else value, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", halve_the_first)
    file = store.append(memory / "parts" / "w0-00000.arrow")
    file.write(b"whole")
    file.sync()
    assert sent == [b"whole", b"whole"] and store.read(memory / "parts" / "w0-00000.arrow") == b"whole"


def test_a_server_that_stays_away_ends_the_wait_with_a_remedy(s3: S3Server, tmp_path: Path) -> None:
    store, job = s3_store(s3, tmp_path, patience_s=0.5), Path(f"s3://{s3.bucket}/job")
    store.replace(job / "workers" / "w0.json", b"{}")

    def away(method: str, key: str) -> None:
        raise CutOff

    s3.watch = away
    with pytest.raises(StoreUnreachable, match=r"output\.dir.*start the same command again"):
        store.read(job / "workers" / "w0.json")
    # what is left to do at the end does not wait as long again, each in turn
    began = time.monotonic()
    for _ in range(5):
        with pytest.raises(StoreUnreachable):
            store.exists(job / "job.json")
    assert time.monotonic() - began < 2.0
    s3.behave()
    assert store.read(job / "workers" / "w0.json") == b"{}"


def test_what_no_second_attempt_mends_is_said_at_once(s3: S3Server, tmp_path: Path) -> None:
    store = s3_store(s3, tmp_path, patience_s=60.0)
    began = time.monotonic()
    with pytest.raises(FileNotFoundError):
        store.replace(Path("s3://no-such-bucket/job/workers/w0.json"), b"{}")
    assert time.monotonic() - began < 5.0


class Overwriting(MemoryFileSystem):
    """Has never heard of the mode, and takes it."""

    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        super().pipe_file(path, value, mode="overwrite")


class Modeless(MemoryFileSystem):
    cachable = False

    def pipe_file(self, path: str, value: bytes) -> None:  # type: ignore[override]
        super().pipe_file(path, value)


def test_a_store_is_asked_whether_it_creates_for_one_alone(
    memory: Path, s3: S3Server, tmp_path: Path
) -> None:
    job = Path(f"s3://{s3.bucket}/job")
    require_conditional_create(s3_store(s3, tmp_path), job)
    assert s3.files.find(s3.bucket) == []
    s3.ignores_conditions = True
    for store, path in (
        (s3_store(s3, tmp_path), job),
        (RemoteStore(Overwriting(), tmp_path), memory),
        (RemoteStore(Modeless(), tmp_path), memory),
    ):
        with pytest.raises(NoConditionalCreate, match=r"output\.dir=.*shared file system"):
            require_conditional_create(store, path)
        assert store.tree(path) == []


def test_urls_are_told_from_paths() -> None:
    for url in ("s3://bucket/job", Path("s3://bucket/job"), "gs://b/j", "memory://j"):
        assert is_remote(url)
    for path in ("outputs/demo", "/data/a:b", Path("outputs/s3"), "./s3:/odd", "C:/here"):
        assert not is_remote(path)
        assert local_folder(path, "/stage") == Path(path) and isinstance(open_store(path), FileStore)
    # a worker finds the same folder however the URL passed through
    assert local_folder("s3://b/j", "/stage") == local_folder(Path("s3://b/j/"), "/stage")
    assert local_folder("s3://b/j", "/stage") != local_folder("s3://b/k", "/stage")


@pytest.mark.parametrize("url", ["file:///data/job", "nosuch://bucket/job"])
def test_a_url_without_a_store_names_the_key(url: str) -> None:
    with pytest.raises(ValueError, match=r"output\.dir=" + url[:4]):
        open_store(url)
