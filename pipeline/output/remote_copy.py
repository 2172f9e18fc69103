"""A remote job's directory as local files, for what reads every byte of it: `verify` and `finalize`.

Knows: in which order files must be copied while workers write. Refuses to know: what is in them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pipeline.output.layout import DATASET, INPUT_FILE, JOB_FILE, JOURNAL, LEASES, PARTS, WORKERS
from pipeline.store import is_remote, local_folder, open_store
from pipeline.stores.remote import RemoteStore

T = TypeVar("T")

# Object stores answer slowly, not narrowly.
_AT_ONCE = 16


@contextmanager
def local_copy(job: str | Path, stage_dir: str | None = None) -> Iterator[Path]:
    """`job` itself if it is local, else a copy of it that is gone at the end.

    stage_dir: where the copy is made; the disk must have room for the job. Errors speak of `job`.
    """
    if not is_remote(job):
        yield Path(job)
        return
    stage = local_folder(job, stage_dir)
    stage.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=stage) as folder:
        try:
            _copy(_remote(job), Path(job), Path(folder))
            yield Path(folder)
        except ValueError as error:
            raise ValueError(renamed(str(error), Path(folder), job)) from error


def publish(copy: Path, job: str | Path, name: str) -> None:
    """Puts a file or folder that was made in a copy of `job` in the place of an earlier one there.

    A dataset is none before its last object is there, the metadata: run again what was interrupted. Nothing
    is to be done for a local job, which is its own copy.
    """
    if not is_remote(job):
        return
    store, made, target = _remote(job), copy / name, Path(job) / name
    if made.is_file():
        store.upload(made, target)
        return
    store.remove(target)
    files = [path.relative_to(made) for path in made.rglob("*") if path.is_file()]
    for some in (lambda file: file.suffix != ".json", lambda file: file.suffix == ".json"):
        _at_once(lambda file: store.upload(made / file, target / file), filter(some, files))


def renamed(text: str, copy: Path, job: str | Path) -> str:
    """`text` with the job's own name where it speaks of a copy's."""
    return text.replace(str(copy), str(job)) if is_remote(job) else text


def _copy(store: RemoteStore, job: Path, copy: Path) -> None:
    if not store.exists(job / JOB_FILE):
        raise ValueError(f"{copy} holds no job: there is no {JOB_FILE} in it")
    _fetch(store, job, copy, [JOB_FILE, INPUT_FILE])
    # what journals speak of is in the parts before, and a commit is judged by leases no older than it
    for folder in (JOURNAL, PARTS):
        _fetch(store, job, copy, [f"{folder}/{name}" for name in store.names(job / folder)])
    for folder in (LEASES, WORKERS, DATASET):
        _fetch(store, job, copy, [f"{folder}/{name}" for name in store.tree(job / folder)])


def _fetch(store: RemoteStore, job: Path, copy: Path, names: Iterable[str]) -> None:
    def fetch(name: str) -> None:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        store.download(job / name, copy / name)

    _at_once(fetch, names)


def _at_once(do: Callable[[T], None], things: Iterable[T]) -> None:
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for done in [threads.submit(do, thing) for thing in things]:
            done.result()


def _remote(job: str | Path) -> RemoteStore:
    store = open_store(job)
    assert isinstance(store, RemoteStore)
    return store
