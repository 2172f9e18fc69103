"""A network file system lists names late: a worker that believes its listings makes rows twice or too few."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster.test_claims import Cluster, claim, units
from fake_jobs import FakeSource, Worker, plan

from pipeline import durable
from pipeline.cluster.claims import Verdict
from pipeline.cluster.processes import Process
from pipeline.output.layout import LEASES
from pipeline.output.progress import JobDirectory
from pipeline.store import FileStore


class LateStore(FileStore):
    """Lists no name that `is_late`."""

    def __init__(self, is_late: Callable[[str], bool]) -> None:
        super().__init__()
        self.is_late = is_late

    def names(self, folder: Path) -> list[str]:
        return [name for name in super().names(folder) if not self.is_late(name)]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "job")


def late_worker(cluster: Cluster, name: str, is_late: Callable[[str], bool]) -> Worker:
    cluster.worker("first")
    directory = JobDirectory.load(cluster.path, LateStore(is_late))
    process = Process(f"host-of-{name}", 5, "boot", "pid:[1]", 7)
    return Worker.on(directory, cluster.source, name, process, clock=lambda: cluster.now)


def test_what_a_cut_lets_count_is_not_made_again_though_its_journal_is_not_listed(cluster: Cluster) -> None:
    dead, middle = cluster.worker("dead"), cluster.worker("middle")
    cluster.work(dead, claim(dead), num_rows=2)
    dead.member.leave("killed")
    for _ in range(7):
        cluster.work(middle, claim(middle))
    # the heir before the last saw the journal, and its cut says that the rows count
    taken = claim(middle)
    assert units(taken) == [0] and taken.ranges() == [range(2, 4)]
    middle.member.leave("killed")
    heir = late_worker(cluster, "heir", lambda name: name.startswith("dead-"))
    again = claim(heir)
    assert units(again) == [0] and again.ranges() == [range(2, 4)]
    assert cluster.work(heir, again) == 2
    assert set(cluster.made.values()) == {1}
    heir.writer.close()
    cluster.assert_complete()


def test_a_unit_whose_lease_is_not_listed_is_not_complete(cluster: Cluster) -> None:
    other = cluster.worker("other")
    held = claim(other)
    late = late_worker(cluster, "late", lambda name: name == f"{held.unit.number:08d}.0")
    for _ in range(7):
        cluster.work(late, claim(late))
    for _ in range(3):
        assert late.claims.advance() is Verdict.wait
        cluster.now += 2
    # now it is listed, and its holder has been silent for long enough
    late.directory.store.is_late = lambda name: False
    assert cluster.work_to_the_end(late) is Verdict.complete
    cluster.assert_complete()


def test_who_retries_waits_until_it_knows_whether_a_holder_lives(cluster: Cluster) -> None:
    cluster.failing = lambda ordinal: ordinal == 2
    first = cluster.worker("first")
    begun = claim(first)
    first.member.beat(first.claims.held())
    cluster.work(first, begun)
    cluster.work_to_the_end(cluster.worker("second"))
    # its last record says that it works on the unit; it died without a word
    cluster.failing = lambda ordinal: False
    retrier = cluster.worker("retrier", retry_errors=True)
    assert retrier.claims.advance() is Verdict.wait
    assert cluster.work_to_the_end(retrier) is Verdict.complete
    assert cluster.made[2, 0] == 2
    cluster.assert_complete()


def test_the_folder_of_leases_is_durable_before_the_first_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut that takes it would free units whose rows are there, and they would be made twice."""
    job, real = tmp_path / "job", durable.fsync_directory
    durable_names: set[str] = set()

    def noted(path: Path) -> None:
        real(path)
        if path == job:
            durable_names.update(entry.name for entry in job.iterdir())

    monkeypatch.setattr(durable, "fsync_directory", noted)
    source = FakeSource()
    JobDirectory.open(job, plan(source), source.scan())
    assert {LEASES, "parts", "journal", "job.json"} <= durable_names
