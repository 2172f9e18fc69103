"""Resuming: nothing lost, nothing twice, whatever ends a job and wherever."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fake_jobs import Crash, Disk, FakeSource, Run, Worker, complete, plan

from pipeline.input.rows import read_rows
from pipeline.input.source import InputIndex, input_file
from pipeline.output.finalize import finalize
from pipeline.output.keys import last_of_each, ranges_of
from pipeline.output.layout import part_path
from pipeline.output.progress import JobDirectory
from pipeline.output.reader import open_parts
from pipeline.output.stored import StoredRows
from pipeline.output.verify import verify

SMALL = ((5, 3), (4,))


def dataset_bytes(job: Run) -> dict[str, bytes]:
    folder = finalize(job.path).path
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def small_job(path, **options) -> Run:
    source = FakeSource(SMALL)
    return Run(path, source, plan(source, samples=2), commit_every=5, max_part_bytes=9_000, **options)


@pytest.fixture
def calm(tmp_path):
    job = small_job(tmp_path / "calm")
    job.start()
    return dataset_bytes(job)


@pytest.mark.parametrize("power", [True, False], ids=["power cut", "kill"])
def test_a_crash_between_any_two_steps_loses_and_doubles_nothing(tmp_path, monkeypatch, calm, power):
    """A kill between the data's fsync and the journal's, in a roll-over, in the last close: everywhere."""
    seen = set()
    for crash_at in range(10_000):
        job = small_job(tmp_path / str(crash_at))
        with monkeypatch.context() as patch:
            disk = Disk(patch, job.path, crash_at)
            try:
                job.start()
            except Crash as crash:
                seen.add(str(crash))
            else:
                break
        if power and (job.path / "job.json").exists():
            disk.power_cut()
        committed = open_parts(job.path).num_rows if (job.path / "job.json").exists() else 0
        assert len(job.start()) == 24 - committed
        verdict = verify(job.path, job.source)
        assert verdict.complete, (crash_at, verdict.problems)
        assert dataset_bytes(job) == calm, crash_at
    assert crash_at > 40
    steps = ("create", "write", "fsync_file", "fsync_directory", "rename", "link")
    assert seen == {f"{when} {step}" for when in ("before", "after") for step in steps}


def test_what_was_committed_survives_a_power_cut(tmp_path, monkeypatch):
    """The journal must not run ahead of the data: it would vouch for bytes that are gone."""
    safe = set()
    for crash_at in range(12, 10_000):
        job = small_job(tmp_path / str(crash_at))
        with monkeypatch.context() as patch:
            disk = Disk(patch, job.path, crash_at)
            try:
                job.start()
            except Crash:
                pass
            else:
                break
        disk.power_cut()
        if not (job.path / "job.json").exists():
            assert job.acknowledged == 0
            continue
        assert open_parts(job.path).to_table().num_rows >= job.acknowledged
        safe.add(job.acknowledged)
    assert {0, 5, 10, 15, 20} <= safe


def test_kills_at_random_moments_of_a_job_give_the_bytes_of_a_calm_one(tmp_path):
    source = FakeSource(((100, 100), (150, 50)))
    calm = Run(tmp_path / "calm", source, plan(source, unit_rows=64))
    calm.start()
    job = Run(tmp_path / "job", source, plan(source, unit_rows=64), commit_every=7)
    chance = random.Random(1)
    for _ in range(15):
        job.start(stop_after=chance.randrange(40))
    job.start()
    assert verify(job.path, source).complete
    assert dataset_bytes(job) == dataset_bytes(calm)


@pytest.mark.parametrize("shuffle", [False, True])
def test_three_interruptions_of_a_long_job(tmp_path, shuffle):
    source = FakeSource(((1000,) * 5,))
    job = Run(tmp_path / "job", source, plan(source, unit_rows=500, shuffle=shuffle), commit_every=100)
    made = [job.start(stop_after) for stop_after in (100, 200, 300, None)]
    keys = [key for start in made for key in start]
    assert len(keys) == len(set(keys)) == 5000
    if shuffle:
        assert open_parts(job.path).to_table().column("row").to_pylist()[:5] != list(range(5))


def test_repeated_user_ids_do_not_matter(tmp_path):
    source = FakeSource(((60,),))
    job = Run(tmp_path / "job", source, plan(source))
    job.start(stop_after=20)
    job.start()
    table = open_parts(job.path).to_table()
    assert len(set(table.column("id").to_pylist())) == 3 and table.num_rows == 60


def test_the_second_line_goes_on_and_the_third_does_nothing(tmp_path):
    job = small_job(tmp_path / "job")
    job.start(stop_after=12)
    assert len(job.start()) == 14
    assert job.start() == []


def test_a_resumed_job_opens_only_blocks_with_something_to_do(tmp_path):
    """One file of ten row groups, killed in the eighth: nothing before it is read again."""
    source = FakeSource(((20,) * 10,))
    job = Run(tmp_path / "job", source, plan(source, unit_rows=10), commit_every=1)
    job.start(stop_after=145)
    opened = []
    read = source.read
    source.read = lambda block, columns: (opened.append(block.locator), read(block, columns))[1]
    assert len(job.start()) == 55
    # it begins in the middle of what is free, which lies in the ninth, and comes back to its beginning
    assert sorted(opened) == [7, 8, 8, 9]


def test_only_units_partly_done_are_read(tmp_path, monkeypatch):
    source = FakeSource(((40,),))
    job = Run(tmp_path / "job", source, plan(source, unit_rows=10), commit_every=5)
    job.start(stop_after=26)
    asked = []
    real = StoredRows.unit
    monkeypatch.setattr(
        StoredRows, "unit", lambda self, unit: (asked.append(unit.number), real(self, unit))[1]
    )
    claims = Worker.on(JobDirectory.load(job.path), source, "next").claims
    assert [claim.ranges() for claim in (claims.advance(), claims.advance())] == [
        [range(30, 40)],
        [range(25, 30)],
    ]
    assert asked == [2]


def test_a_row_that_lacks_some_samples_is_asked_for_those(tmp_path):
    source = FakeSource(((4,),))
    job = Run(tmp_path / "job", source, plan(source, samples=3), commit_every=1)
    job.start(stop_after=4)
    directory = JobDirectory.load(job.path)
    claims = Worker.on(directory, source, "next").claims
    assert claims.count_missing() == 8
    claim = claims.advance()
    rows = read_rows(source, directory.order, claim.ranges(), ["id"])
    assert [(row.ordinal, claim.samples(row)) for row in rows] == [
        (1, (1, 2)),
        (2, (0, 1, 2)),
        (3, (0, 1, 2)),
    ]


def test_errors_are_generated_again_only_if_asked(tmp_path):
    """10 rows, 3 passing errors: exactly these 3 again, and they count once."""
    source = FakeSource(((10,),))
    job = Run(tmp_path / "job", source, plan(source), failing=lambda ordinal: ordinal in (2, 5, 9))
    job.start()
    assert job.start() == []
    job.failing, job.retry_errors = (lambda ordinal: ordinal == 5), True
    assert job.start() == [(2, 0), (5, 0), (9, 0)]
    table = open_parts(job.path).to_table()
    assert table.num_rows == open_parts(job.path).num_rows == 10
    failed = {r["row"] for r in table.to_pylist() if r["finish_reason"] == "error"}
    assert failed == {5}
    verdict = verify(job.path, source)
    assert verdict.complete and verdict.num_errors == 1
    job.failing = lambda ordinal: False
    assert job.start() == [(5, 0)]
    calm = Run(tmp_path / "calm", source, plan(source))
    calm.start()
    assert dataset_bytes(job) == dataset_bytes(calm)


def test_an_interrupted_retry_counts_no_row_as_done_that_is_not(tmp_path):
    """7 rows of which 3 failed, then 3 again: ten rows are stored, three are still to do."""
    source = FakeSource(((10,),))
    job = Run(tmp_path / "job", source, plan(source, unit_rows=10), commit_every=1)
    job.failing = lambda ordinal: ordinal < 3
    job.start(stop_after=7)
    job.failing, job.retry_errors = (lambda ordinal: False), True
    job.start(stop_after=3)
    job.retry_errors = False
    assert job.start() == [(7, 0), (8, 0), (9, 0)]
    assert verify(job.path, source).complete


def test_another_job_is_refused_by_key(tmp_path):
    source = FakeSource(SMALL)
    Run(tmp_path / "job", source, plan(source)).start(stop_after=3)
    other = Run(tmp_path / "job", source, plan(source, fingerprint={"sampling.temperature": 0.8}))
    with pytest.raises(ValueError, match="sampling.temperature: 0.7 → 0.8.*another output.dir"):
        other.start()


def test_a_job_keeps_its_units(tmp_path):
    source = FakeSource(((30,),))
    Run(tmp_path / "job", source, plan(source, unit_rows=10), commit_every=4).start(stop_after=13)
    again = Run(tmp_path / "job", source, plan(source, unit_rows=7))
    assert len(again.start()) == 18
    assert verify(tmp_path / "job", source).complete


def test_a_job_that_wrote_nothing_gives_way_to_another_unless_it_is_at_work(tmp_path):
    source = FakeSource(SMALL)
    mistyped = plan(source, fingerprint={"sampling.temperature": 70})
    JobDirectory.open(tmp_path / "job", mistyped, source.scan())
    with pytest.raises(ValueError, match="sampling.temperature: 70 → 0.7"):
        JobDirectory.open(tmp_path / "job", plan(source), source.scan(), alone=lambda: False)
    JobDirectory.open(tmp_path / "job", plan(source), source.scan(), alone=lambda: True)
    assert JobDirectory.load(tmp_path / "job").plan.fingerprint == {"sampling.temperature": 0.7}


def test_eight_processes_start_a_job_at_once(tmp_path):
    """One of them makes it, the others go on with it; nobody sees half of it."""
    source = FakeSource(SMALL)
    ours, theirs = plan(source), plan(source, fingerprint={"sampling.temperature": 0.8})
    for attempt in range(5):
        path = tmp_path / str(attempt)
        barrier = threading.Barrier(8)

        def start(number, path=path, barrier=barrier):
            barrier.wait()
            try:
                opened = JobDirectory.open(path, ours if number else theirs, source.scan(), lambda: False)
            except ValueError as error:
                assert "sampling.temperature" in str(error)
                return None
            return opened.plan.digest

        with ThreadPoolExecutor(8) as pool:
            opened = list(pool.map(start, range(8)))
        assert len({digest for digest in opened if digest}) == 1
        assert JobDirectory.load(path).plan.digest in opened
        assert [name.name for name in path.iterdir() if name.name.startswith(".")] == []


def extended(index: InputIndex, blocks: list[tuple[int, int]]) -> InputIndex:
    new = input_file(len(index.files), "part-new.parquet", 5, "new", blocks)
    return InputIndex((*index.files, new), index.schema)


def test_files_that_came_later_are_added_only_if_wanted(tmp_path):
    source = FakeSource(((6,),))
    job = Run(tmp_path / "job", source, plan(source), commit_every=1)
    job.start()
    longer = extended(source.scan(), [(5, 0)])
    with pytest.raises(
        ValueError, match="has new files, the first part-new.parquet.*source.allow_append=true"
    ):
        JobDirectory.open(job.path, plan(source), longer)
    wanted = plan(source)
    wanted.source.allow_append = True
    directory = JobDirectory.open(job.path, wanted, longer)
    claims = Worker.on(directory, source, "next").claims
    assert [claim.ranges() for claim in (claims.advance(), claims.advance())] == [
        [range(8, 11)],
        [range(6, 8)],
    ]
    shuffled = plan(source, shuffle=True)
    shuffled.source.allow_append = True
    with pytest.raises(ValueError, match="cannot add files to a shuffled job"):
        JobDirectory.open(job.path, shuffled, extended(longer, [(1, 0)]))


def test_a_changed_or_lost_file_is_refused(tmp_path):
    source = FakeSource(SMALL)
    Run(tmp_path / "job", source, plan(source)).start(stop_after=3)
    changed = FakeSource(((5, 4), (4,))).scan()
    with pytest.raises(ValueError, match=r"changed: file 0 was part-0.parquet \(8 rows.*\(9 rows"):
        JobDirectory.open(tmp_path / "job", plan(source), changed)
    with pytest.raises(ValueError, match="lost part-1.parquet"):
        JobDirectory.open(tmp_path / "job", plan(source), FakeSource(SMALL[:1]).scan())


def test_a_directory_that_is_no_job_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no job"):
        JobDirectory.load(tmp_path)
    source = FakeSource(SMALL)
    job = Run(tmp_path / "job", source, plan(source))
    job.start()
    (job.path / "job.json").unlink()
    with pytest.raises(ValueError, match="holds parts but no job.json"):
        job.start()
    (job.path / "job.json").write_text("{")
    with pytest.raises(ValueError, match="job.json is damaged"):
        job.start()


def test_no_secret_of_the_storage_is_kept(tmp_path):
    source = FakeSource(SMALL)
    job = Run(tmp_path / "job", source, plan(source))
    job.plan.source.storage_options = {"password": "hush"}
    job.start()
    assert "hush" not in (job.path / "job.json").read_text()
    assert json.loads((job.path / "job.json").read_text())["source"]["kind"] == "ParquetSource"


def test_an_error_elsewhere_leaves_finished_rows_behind(tmp_path):
    source = FakeSource(SMALL)
    job = Run(tmp_path / "job", source, plan(source))
    directory = JobDirectory.open(job.path, job.plan, source.scan())
    worker = Worker.on(directory, source, "w0")
    row, sample = next(worker.rows())
    with pytest.raises(RuntimeError), worker.writer as writer:
        writer.append(complete(row, sample))
        raise RuntimeError("the engine died")
    assert open_parts(job.path).num_rows == 1


def test_the_rule_of_the_last():
    assert last_of_each(np.array([3, 1, 3, 2, 1])).tolist() == [False, False, True, True, True]
    assert last_of_each(np.array([], int)).tolist() == []


def test_ranges_of_numbers():
    assert ranges_of(np.array([1, 2, 3, 7, 9, 10])) == [(1, 4), (7, 8), (9, 11)]
    assert ranges_of(np.array([], int)) == []


def test_a_part_half_made_is_passed_over(tmp_path):
    job = small_job(tmp_path / "job")
    job.start(stop_after=6)
    part_path(job.path, "w0-00005").write_bytes(b"\xff\xff")
    (job.path / "journal" / "w0-00006.jsonl").write_bytes(b'{"kind": "head')
    job.start()
    assert verify(job.path, job.source).complete
