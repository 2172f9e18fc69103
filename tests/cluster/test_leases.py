"""Leases: one winner, chains that say which commits count, and what a damaged one is called."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from pipeline import durable
from pipeline.cluster.leases import LeaseTaker, last_commit
from pipeline.output import journal
from pipeline.output.chains import Chain, Lease, Leases, Position
from pipeline.output.journal import Commit, Header, JournalWriter, Totals, UnitRows
from pipeline.output.layout import journal_path, lease_path
from pipeline.store import FileStore


@pytest.fixture
def leases(tmp_path) -> Leases:
    return Leases(FileStore(), tmp_path)


def taker(tmp_path, leases, name: str) -> LeaseTaker:
    return LeaseTaker(FileStore(), tmp_path, leases, name)


def write_journal(tmp_path, incarnation: str, seq: int, offsets: list[int], torn: bytes = b"") -> None:
    (tmp_path / "journal").mkdir(exist_ok=True)
    name = f"{incarnation}-{seq:05d}"
    path = journal_path(tmp_path, name)
    writer = JournalWriter(path, Header(name, incarnation, "w", "f", "s", 100, "00", 1.0, 2.0, 5.0))
    for number, offset in enumerate(offsets):
        writer.append(Commit(number, offset, 1, "ab", (UnitRows(0, 1, 0, 0),), Totals(rows=number + 1), 0.0))
    writer.close()
    with open(path, "ab") as file:
        file.write(torn)


def test_of_many_who_claim_at_once_one_succeeds(tmp_path, leases):
    barrier = Barrier(8)

    def claim(name: int) -> list[bool]:
        own = taker(tmp_path, Leases(FileStore(), tmp_path), f"w{name}")
        won = []
        for unit in range(20):
            barrier.wait()
            won.append(own.claim(unit))
        return won

    with ThreadPoolExecutor(8) as pool:
        won = np.array(list(pool.map(claim, range(8))))
    assert won.sum(axis=0).tolist() == [1] * 20
    for unit in range(20):
        assert leases.lease(unit, 0).incarnation == f"w{int(np.argmax(won[:, unit]))}"
    folder = lease_path(tmp_path, 0, 0).parent
    assert sorted(os.listdir(folder)) == [f"{unit:08d}.0" for unit in range(20)]


def test_a_chain_grows_and_its_names_alone_tell_the_highest(tmp_path, leases):
    write_journal(tmp_path, "a", 0, [200, 300])
    write_journal(tmp_path, "a", 1, [150], torn=b'{"kind": "comm')
    assert taker(tmp_path, leases, "a").claim(4097)
    assert not taker(tmp_path, leases, "b").claim(4097)
    assert taker(tmp_path, leases, "b").take_over(leases.chain(4097, 0))
    assert not taker(tmp_path, leases, "c").take_over(leases.chain(4097, 0))
    assert taker(tmp_path, leases, "b").give_back(leases.chain(4097, 1))
    assert taker(tmp_path, leases, "a").take_over(leases.chain(4097, 2))
    fences = leases.fences(5000)
    assert fences[4097] == 3 and (np.delete(fences, 4097) == -1).all()
    chain = leases.chain(4097, 3)
    assert [lease.incarnation for lease in chain.leases] == ["a", "b", None, "a"]
    assert [lease.cut for lease in chain.leases] == [None, Position(1, 150), None, None]
    # what it wrote while it held the unit first is judged by the first cut alone
    assert chain.leases[3].since == Position(1, 150)
    assert chain.holder == "a" and chain.incarnations == {"a", "b"}


def lease(fence: int, incarnation: str | None, cut=None, since=None) -> Lease:
    return Lease(0, fence, incarnation, cut and Position(*cut), since and Position(*since), 0.0)


@pytest.mark.parametrize(
    ("chain", "incarnation", "position", "fence"),
    [
        ([lease(0, "a")], "a", (0, 100), 0),
        ([lease(0, "a")], "b", (0, 100), None),
        # inclusive, part before byte
        ([lease(0, "a"), lease(1, "b", (1, 50))], "a", (0, 900), 0),
        ([lease(0, "a"), lease(1, "b", (1, 50))], "a", (1, 50), 0),
        ([lease(0, "a"), lease(1, "b", (1, 50))], "a", (1, 51), None),
        ([lease(0, "a"), lease(1, "b", (1, 50))], "a", (2, 10), None),
        ([lease(0, "a"), lease(1, "b", (1, 50))], "b", (0, 10), 1),
        # it had committed nothing
        ([lease(0, "a"), lease(1, "b")], "a", (0, 10), None),
        # given back, taken by another
        ([lease(0, "a"), lease(1, None, (0, 70)), lease(2, "b")], "a", (0, 70), 0),
        ([lease(0, "a"), lease(1, None, (0, 70)), lease(2, "b")], "a", (0, 80), None),
        # lost and had again: what it wrote in between counts under neither
        ([lease(0, "a"), lease(1, "b", (0, 50)), lease(2, "a", (0, 9), (0, 80))], "a", (0, 50), 0),
        ([lease(0, "a"), lease(1, "b", (0, 50)), lease(2, "a", (0, 9), (0, 80))], "a", (0, 80), None),
        ([lease(0, "a"), lease(1, "b", (0, 50)), lease(2, "a", (0, 9), (0, 80))], "a", (0, 81), 2),
        # by its own hand, to retry errors
        ([lease(0, "a"), lease(1, "a", (0, 50), (0, 50))], "a", (0, 50), 0),
        ([lease(0, "a"), lease(1, "a", (0, 50), (0, 50))], "a", (0, 60), 1),
    ],
)
def test_which_commits_count(chain, incarnation, position, fence):
    assert Chain(tuple(chain)).fence_of(incarnation, Position(*position)) == fence


def test_the_last_commit_is_the_last_whole_line_of_the_last_part_that_has_one(tmp_path):
    store = FileStore()
    assert last_commit(store, tmp_path, "a") is None
    write_journal(tmp_path, "a", 9, [200])
    write_journal(
        tmp_path, "a", 10, [180, 190], torn=journal.encode(Commit(2, 250, 1, "", (), Totals(), 0))[:-1]
    )
    write_journal(tmp_path, "a", 11, [])
    # others whose names begin alike
    write_journal(tmp_path, "a-1", 12, [999])
    write_journal(tmp_path, "aa", 12, [999])
    assert last_commit(store, tmp_path, "a") == Position(10, 190)


def test_what_a_cut_lets_count_is_made_durable_first(tmp_path, leases, monkeypatch):
    """The holder may have died between writing a line and its fsync; a power cut would take the row."""
    write_journal(tmp_path, "a", 0, [200])
    taker(tmp_path, leases, "a").claim(0)
    steps = []
    for name in ("fsync_file", "link"):
        real = getattr(durable, name)

        def step(first, *rest, name=name, real=real):
            path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
            steps.append((name, path.endswith(".jsonl")))
            return real(first, *rest)

        monkeypatch.setattr(durable, name, step)
    taker(tmp_path, leases, "b").take_over(leases.chain(0, 0))
    assert steps[0] == ("fsync_file", True) and ("link", False) in steps


def test_a_lease_comes_back_as_it_was_made(tmp_path, leases):
    made = Lease(7, 0, "w.1", None, None, 3.5)
    assert leases.create(made) and not leases.create(made)
    assert leases.lease(7, 0) == made
    full = Lease(7, 1, None, Position(2, 10), Position(0, 5), 4.5)
    assert leases.create(full) and leases.lease(7, 1) == full


@pytest.mark.parametrize("text", ["", "{", "[]", '{"unit": 3}', '{"unit": 9, "fence": 0}'])
def test_a_damaged_lease_is_named(tmp_path, leases, text):
    assert leases.create(Lease(3, 0, "w", None, None, 0.0))
    path = lease_path(tmp_path, 3, 0)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"00000003\.0 is damaged .*restore the file"):
        leases.lease(3, 0)


def test_a_missing_or_foreign_lease_is_named(tmp_path, leases):
    assert leases.create(Lease(3, 1, "w", None, None, 0.0))
    with pytest.raises(ValueError, match=r"00000003\.0 is missing: restore the file"):
        leases.chain(3, 1)
    (lease_path(tmp_path, 3, 0)).write_bytes(lease_path(tmp_path, 3, 1).read_bytes())
    with pytest.raises(ValueError, match="speaks of unit 3, fence 1"):
        leases.chain(3, 1)
    (lease_path(tmp_path, 3, 0).parent / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"notes\.txt is no lease"):
        leases.fences(5)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_refused_with_the_remedy(tmp_path, leases, monkeypatch, number):
    def no_link(source, target):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(durable, "link", no_link)
    with pytest.raises(ValueError, match=r"output\.dir.*cannot create a second name.*choose an output\.dir"):
        leases.create(Lease(0, 0, "w", None, None, 0.0))
    assert os.listdir(lease_path(tmp_path, 0, 0).parent) == []


def test_a_link_whose_reply_got_lost_still_counts(leases, monkeypatch):
    """Network file systems ask again, and then the name is taken: by oneself."""
    real = durable.link

    def twice(source, target):
        real(source, target)
        real(source, target)

    monkeypatch.setattr(durable, "link", twice)
    assert leases.create(Lease(0, 0, "w", None, None, 0.0))
