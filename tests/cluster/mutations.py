"""The protocol with one of its precautions taken out: if the simulator does not notice, it proves nothing.

Knows: what to take out, as patches of pipeline/. Refuses to know: how a run is judged.

    PYTHONPATH=.:tests python -m cluster.mutations FIRST..LAST [NAME...]     in how many seeds each is noticed
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cluster import simulator

from pipeline import durable
from pipeline.cluster.claims import Claims
from pipeline.output.chains import Chain, Lease
from pipeline.store import FileStore, _AppendFile


def _no_sync(fragment: str) -> Any:
    real = durable.fsync_file

    def fsync_file(descriptor: int) -> None:
        if fragment not in durable.os.path_of(descriptor):  # type: ignore[attr-defined]
            real(descriptor)

    return mock.patch.object(durable, "fsync_file", fsync_file)


def _no_folder_sync(fragment: str) -> Any:
    real = durable.fsync_directory

    def fsync_directory(path: Any) -> None:
        if fragment not in f"{path}/":
            real(path)

    return mock.patch.object(durable, "fsync_directory", fsync_directory)


def _cut_not_asked() -> Any:
    def fence_of(chain: Chain, incarnation: str, position: Any) -> int | None:
        fences = [lease.fence for lease in chain.leases if lease.incarnation == incarnation]
        return fences[-1] if fences else None

    return mock.patch.object(Chain, "fence_of", fence_of)


def _cut_of_everything() -> Any:
    """The heir counts all that the holder wrote, as if it had stopped."""
    real = Chain.fence_of

    def fence_of(chain: Chain, incarnation: str, position: Any) -> int | None:
        if chain.holder != incarnation and chain.leases[0].incarnation == incarnation:
            return 0
        return real(chain, incarnation, position)

    return mock.patch.object(Chain, "fence_of", fence_of)


def _rows_before_the_cut() -> Any:
    """What is missing of a unit is looked up before the lease says where its holder ended."""
    real = Claims._take

    def take(claims: Claims, takeable: Any) -> Any:
        before = claims._stored(claims._leases.chain(takeable.unit, takeable.fence))
        with mock.patch.object(claims, "_stored", lambda chain: before):
            return real(claims, takeable)

    return mock.patch.object(Claims, "_take", take)


def _no_since() -> Any:
    real = Lease.encode

    def encode(lease: Lease) -> bytes:
        return real(Lease(lease.unit, lease.fence, lease.incarnation, lease.cut, None, lease.time))

    return mock.patch.object(Lease, "encode", encode)


def _create_not_exclusive() -> Any:
    def atomic_create(path: Any, data: bytes) -> bool:
        if path.exists():
            return False
        durable.atomic_write(path, data)
        return True

    return mock.patch.object(durable, "atomic_create", atomic_create)


def _line_before_bytes() -> Any:
    """A commit's line is forced to disk and its bytes are not yet: they come with the next commit."""
    real = _AppendFile.sync

    def sync(file: _AppendFile) -> None:
        if file._path.suffix == ".arrow" and getattr(file, "begun", False):
            return
        file.begun = True  # type: ignore[attr-defined]
        real(file)

    return mock.patch.object(_AppendFile, "sync", sync)


def _make_folder(store: FileStore, folder: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)


def _plain(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(owner, name, value)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "no fsync of a part": lambda: _no_sync("/parts/"),
    "no fsync of a commit's bytes": _line_before_bytes,
    "no fsync of a journal": lambda: _no_sync("/journal/"),
    "no fsync of a lease": lambda: _no_sync("/leases/"),
    "no fsync of a lease's name": lambda: _no_folder_sync("/leases/0"),
    "no fsync of the folder of leases": _plain(
        FileStore, "make_folder", lambda store, folder: folder.mkdir()
    ),
    "no fsync of names of parts and journals": _plain(_AppendFile, "sync_name", lambda file: None),
    "fence and cut are not asked": _cut_not_asked,
    "the first holder's rows all count": _cut_of_everything,
    "rows are looked up before the cut": _rows_before_the_cut,
    "a later lease does not say since when": _no_since,
    "a lease is not created exclusively": _create_not_exclusive,
}
# On these it does not rest that a row counts once: one saves rows that would be void; what the other keeps
# from a power cut would be missed, and made again.
HARMLESS = {
    "no look for a takeover": _plain(Claims, "_is_taken_over", lambda claims, unit, fence: False),
    "an heir does not settle the journal": _plain(FileStore, "settle", lambda store, path: None),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    with {**MUTATIONS, **HARMLESS}[name]():
        yield


def first_noticed(name: str, seeds: range) -> int | None:
    """The first seed that fails with the mutation; None if all pass."""
    for seed in seeds:
        with mutated(name):
            try:
                simulator.run(seed)
            except AssertionError:
                return seed
    return None


def main() -> None:
    first, _, last = sys.argv[1].partition("..")
    seeds = range(int(first), int(last) + 1)
    for name in sys.argv[2:] or [*MUTATIONS, *HARMLESS]:
        noticed = [seed for seed in seeds if first_noticed(name, range(seed, seed + 1)) is not None]
        print(f"{len(noticed):5} of {len(seeds)} seeds: {name} {noticed[:5]}", flush=True)


if __name__ == "__main__":
    main()
