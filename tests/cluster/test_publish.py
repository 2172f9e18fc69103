"""Publishing while the job runs: the same dataset as without, whatever is killed, whoever goes on working."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from fake_jobs import Crash, Disk, FakeSource, Run, Worker, complete, plan

from pipeline import durable
from pipeline import finalize as command
from pipeline.cluster.processes import Process
from pipeline.cluster.publish import Publisher
from pipeline.durable import FullDisk
from pipeline.input.rows import RowReader
from pipeline.output.chains import Leases
from pipeline.output.dataset import DatasetFormat, Sharding
from pipeline.output.finalize import finalize
from pipeline.output.layout import PUBLISHED_HOLDER, journal_path, part_path
from pipeline.output.progress import JobDirectory
from pipeline.output.published import Published, range_path
from pipeline.output.ranges import UnitRange, unit_ranges
from pipeline.output.reader import open_parts
from pipeline.output.verify import verify
from pipeline.status import status

# 2 samples of 4 rows a unit: 3 units a range; 32 rows are 8 units, 3 ranges, of which the last is left.
SHARDING = Sharding(range_rows=24, shard_bytes=2_000)
RANGES = [UnitRange(0, 2), UnitRange(3, 5), UnitRange(6, 7)]
CUT = {"range_rows": SHARDING.range_rows, "shard_bytes": SHARDING.shard_bytes}


def job_at(path: Path, **options) -> Run:
    source = FakeSource(((10, 10, 5), (7,)))
    settled = plan(source, samples=2, completion_ids=True, logprobs=True)
    return Run(path, source, settled, **{"commit_every": 5, **options})


def tree(job: Run) -> dict[str, bytes]:
    folder = job.path / "dataset"
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def publisher(job: Run, sharding: Sharding = SHARDING) -> Publisher:
    return Publisher(JobDirectory.load(job.path), sharding)


def published(job: Run) -> Published:
    directory = JobDirectory.load(job.path)
    return Published.read(directory.store, directory.path)


def keys(job: Run) -> list[tuple[int, int, int]]:
    rows = open_parts(job.path).to_table()
    columns = (rows.column(name).to_pylist() for name in ("file", "row", "sample"))
    return sorted(zip(*columns, strict=True))


@pytest.fixture
def calm(tmp_path) -> Run:
    job = job_at(tmp_path / "calm")
    job.start()
    return job


def test_ranges_are_cut_by_the_input_alone():
    source = FakeSource(((10, 10, 5), (7,)))
    settled = plan(source, samples=2)
    units = settled.order(source.scan()).units(4)
    assert unit_ranges(units, 2, 24) == RANGES
    assert unit_ranges(units, 2, 10**6) == [UnitRange(0, 7)]
    assert unit_ranges(units, 2, 1) == [UnitRange(unit, unit) for unit in range(8)]
    longer = settled.order(FakeSource(((10, 10, 5), (7,), (30,))).scan()).units(4)
    assert unit_ranges(longer, 2, 24)[:2] == RANGES[:2]
    assert unit_ranges(settled.order(FakeSource(()).scan()).units(4), 2, 24) == []


@pytest.mark.parametrize("form", DatasetFormat)
def test_rolling_leaves_no_trace_in_the_dataset(tmp_path, calm, form):
    """Three lives of workers, publishing and deleting after each: the bytes of a job finalised at the end."""
    sharding = Sharding(form, SHARDING.shard_bytes, SHARDING.range_rows)
    finalize(calm.path, form, **CUT)
    job = job_at(tmp_path / "job", max_part_bytes=3_000)
    for stop in (26, 14, None):
        job.start(stop)
        rolling = publisher(job, sharding)
        list(rolling.publish())
        list(rolling.delete_parts())
        assert verify(job.path, job.source).num_results == len(keys(job)) == status(job.path).num_done
    assert list(published(job).ranges) == RANGES[:2]
    assert len(published(job).deleted) > 3
    assert not any(part_path(job.path, name).exists() for name in published(job).deleted)
    assert keys(job) == keys(calm)
    finalize(job.path)
    assert tree(job) == tree(calm)
    assert verify(job.path, job.source).complete
    # published files are not copied
    shard = next(iter(published(job).ranges.values())).shards["arrow"][0]
    assert (job.path / "published" / shard.name).stat().st_nlink == (1 if form.value == "parquet" else 2)


def test_a_dataset_cut_otherwise_is_made_from_what_is_left(tmp_path, calm):
    """Other sizes, other selection: from shards and parts, equal to one from parts alone."""
    job = job_at(tmp_path / "job", max_part_bytes=3_000)
    job.start()
    rolling = publisher(job)
    assert len(list(rolling.publish())) == 2 and list(rolling.delete_parts())
    for one in (calm, job):
        finalize(one.path, DatasetFormat.both, shard_bytes=5_000, range_rows=10**6)
    assert tree(job) == tree(calm)
    assert verify(job.path, job.source).complete


def test_nothing_is_published_twice_or_before_it_is_finished(tmp_path):
    job = job_at(tmp_path / "job")
    job.start(20)
    assert list(publisher(job).publish()) == []
    job.start()
    found = list(publisher(job).publish())
    assert [one.units for one in found] == RANGES[:2]
    assert [one.num_rows for one in found] == [24, 24]
    assert list(publisher(job).publish()) == []
    with pytest.raises(ValueError, match="--range-rows 24, not --format arrow.*--range-rows 8"):
        publisher(job, Sharding(range_rows=8))


def test_published_errors_are_final(tmp_path):
    job = job_at(tmp_path / "job", failing=lambda ordinal: ordinal in (1, 30))
    job.start()
    list(publisher(job).publish())
    job.failing, job.retry_errors = (lambda ordinal: False), True
    assert job.start() == [(30, 0), (30, 1)]
    list(publisher(job).publish())
    finalize(job.path)
    verdict = verify(job.path, job.source)
    assert verdict.complete and verdict.num_errors == 2


def test_a_worker_that_goes_on_with_what_was_published_writes_in_vain(tmp_path, calm):
    """It retries errors of a unit while that is sealed: what it commits before counts, later is void."""
    job = job_at(tmp_path / "job", failing=lambda ordinal: ordinal in (1, 2))
    job.start()
    directory = JobDirectory.load(job.path)
    late = Worker.on(directory, job.source, "late", retry_errors=True)
    rows = late.rows()
    made = [next(rows) for _ in range(2)]
    for row, sample in made:
        assert late.writer.append(complete(row, sample))
    late.writer.commit()
    row, sample = next(rows)
    assert late.writer.append(complete(row, sample))
    assert [one.units for one in publisher(job).publish()] == RANGES[:2]
    late.writer.commit()
    late.writer.close()
    verdict = verify(job.path, job.source)
    assert verdict.complete and verdict.num_errors == 2
    record = json.loads(range_path(job.path, RANGES[0]).read_text())
    assert record["total"]["errors"] == 2 and record["parts"]["late-00000"]["rows"] == 2


def test_errors_that_a_living_worker_is_at_are_not_published(tmp_path):
    job = job_at(tmp_path / "job", failing=lambda ordinal: ordinal == 1)
    job.start()
    late = Worker.on(
        JobDirectory.load(job.path), job.source, "late", process=Process.current(), retry_errors=True
    )
    rows = late.rows()
    first = next(rows)
    late.member.beat(late.claims.held())
    assert [one.units for one in publisher(job).publish()] == [RANGES[1]]
    for row, sample in (first, next(rows)):
        assert late.writer.append(complete(row, sample))
    late.writer.close()
    late.member.beat(late.claims.held())
    assert [one.units for one in publisher(job).publish()] == [RANGES[0]]
    finalize(job.path)
    assert verify(job.path, job.source).num_errors == 0


def test_a_job_that_runs_on_while_it_is_published(tmp_path, calm):
    """A pass after each commit, by one process that follows: never a row twice or missing, parts go."""
    finalize(calm.path, **CUT)
    job = job_at(tmp_path / "job")
    index = job.source.scan()
    directory = JobDirectory.open(job.path, job.plan, index)
    worker = Worker.on(directory, job.source, "w0", process=Process.current(), max_part_bytes=2_000)
    rolling, gone = publisher(job), []
    for number, (row, sample) in enumerate(worker.rows()):
        worker.writer.append(complete(row, sample))
        if number % 7 == 6:
            worker.writer.commit()
            list(rolling.publish())
            gone += rolling.delete_parts()
            assert len(keys(job)) == number + 1
    assert not rolling.is_complete()
    worker.writer.close()
    assert rolling.is_complete() and len(gone) > 2
    finalize(job.path)
    assert tree(job) == tree(calm)
    assert verify(job.path, job.source).complete


def test_the_last_part_of_a_worker_that_may_come_back_stays(tmp_path):
    job = job_at(tmp_path / "job")
    directory = JobDirectory.open(job.path, job.plan, job.source.scan())
    worker = Worker.on(directory, job.source, "w0", process=Process.current())
    reader = RowReader(job.source, directory.order, directory.index.schema.names)
    for _ in range(3):
        claim = worker.claims.advance()
        for wanted in claim.ranges():
            for row in reader.rows(wanted):
                for sample in claim.samples(row):
                    worker.writer.append(complete(row, sample))
    worker.writer.commit()
    rolling = publisher(job)
    found = list(rolling.publish())
    assert not found or list(rolling.delete_parts()) == []
    # a start of the job in its middle: these are units 0 to 2
    assert [one.units for one in found] == RANGES[:1]
    worker.member.leave("stopped")
    assert list(rolling.delete_parts()) == ["w0-00000"]
    job.start()
    assert keys(job)[:1] == [(0, 0, 0)] and len(keys(job)) == 64
    assert verify(job.path, job.source).complete


def test_killed_at_any_step_it_goes_on(tmp_path, calm, monkeypatch):
    """Publishing, deleting and the dataset, killed before and after each durable step and begun again."""
    finalize(calm.path, **CUT)
    job = job_at(tmp_path / "job", max_part_bytes=6_000)
    job.start()
    hit: set[str] = set()
    for crash_at in range(0, 10_000, 3):
        with monkeypatch.context() as patch:
            disk = Disk(patch, job.path, crash_at)
            remove = durable.remove
            patch.setattr(durable, "remove", disk._watched("remove", remove))
            try:
                rolling = publisher(job)
                list(rolling.publish())
                list(rolling.delete_parts())
                finalize(job.path)
            except Crash as crash:
                hit.add(str(crash).split()[1])
            else:
                break
        assert len(keys(job)) == 64
    assert hit == {"write", "fsync_file", "fsync_directory", "rename", "link", "remove", "create"}
    assert len(published(job).deleted) >= 1
    assert tree(job) == tree(calm)
    assert verify(job.path, job.source).complete
    leases = Leases(JobDirectory.load(job.path).store, job.path)
    assert leases.lease(0, int(leases.fences(8)[0])).incarnation == PUBLISHED_HOLDER


def test_two_at_once_do_each_other_no_harm(tmp_path, calm, monkeypatch):
    """While one gives its first shard its name, another publishes everything and deletes the parts."""
    finalize(calm.path, **CUT)
    job = job_at(tmp_path / "job", max_part_bytes=3_000)
    job.start()
    first, second, real = publisher(job), publisher(job), durable.rename
    gone: list[str] = []

    def rename(source, target):
        if not gone and target.suffix == ".arrow":
            gone.append("begun")
            assert [one.units for one in second.publish()] == RANGES[:2]
            gone.extend(second.delete_parts())
        real(source, target)

    monkeypatch.setattr(durable, "rename", rename)
    assert [one.units for one in first.publish()] == RANGES[:1]
    assert len(gone) > 3
    finalize(job.path)
    assert tree(job) == tree(calm)
    assert verify(job.path, job.source).complete


def test_one_that_lost_its_files_to_another_says_so(tmp_path, monkeypatch):
    job = job_at(tmp_path / "job")
    job.start()
    first, real, begun = publisher(job), durable.rename, []

    def rename(source, target):
        if not begun and target.suffix == ".arrow":
            begun.append(publisher(job))
        real(source, target)

    monkeypatch.setattr(durable, "rename", rename)
    with pytest.raises(ValueError, match="another process began to publish"):
        list(first.publish())
    assert len(list(begun[0].publish())) == 2


def test_damage_is_never_published(tmp_path):
    job = job_at(tmp_path / "job")
    job.start()
    path = part_path(job.path, "w0-00000")
    data = path.read_bytes()
    place = data.index(b"said RowKey")
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with pytest.raises(ValueError, match="w0-00000.arrow was altered"):
        list(publisher(job).publish())
    assert published(job).ranges == {}


def test_parts_of_another_job_stop_it(tmp_path):
    job = job_at(tmp_path / "job")
    job.start()
    source = FakeSource(((4,),))
    other = Run(tmp_path / "other", source, plan(source, fingerprint={"sampling.temperature": 0.9}))
    other.start()
    for path in (part_path, journal_path):
        data = path(other.path, "w0-00000").read_bytes()
        path(job.path, "w9-00000").write_bytes(data.replace(b"w0", b"w9"))
    with pytest.raises(ValueError, match="another job .*sampling.temperature: 0.7 → 0.9"):
        list(publisher(job).publish())


def test_a_full_disk_leaves_no_half_of_a_shard(tmp_path, monkeypatch):
    job = job_at(tmp_path / "job")
    job.start()
    rolling, real = publisher(job), durable.write

    def failing(descriptor, data):
        if len(bytes(data)) > 1_500:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, data)

    monkeypatch.setattr(durable, "write", failing)
    with pytest.raises(FullDisk, match="output.dir="):
        list(rolling.publish())
    assert [p.name for p in (job.path / "published").iterdir()] == ["sharding.json"]
    monkeypatch.setattr(durable, "write", real)
    assert len(list(rolling.publish())) == 2


def test_verify_proves_what_is_left_of_deleted_parts(tmp_path):
    job = job_at(tmp_path / "job", max_part_bytes=3_000)
    job.start()
    rolling = publisher(job)
    list(rolling.publish())
    gone = list(rolling.delete_parts())
    finalize(job.path)
    assert gone and verify(job.path, job.source).complete
    shard = job.path / "published" / published(job).ranges[RANGES[0]].shards["arrow"][0].name
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"said RowKey", b"sbid RowKey", 1))
    problems = verify(job.path, job.source).problems
    assert f"shard {shard} was altered: it has another hash than its record says" in problems
    shard.write_bytes(data)
    record = range_path(job.path, RANGES[0])
    text = record.read_text()
    record.unlink()
    assert "is missing, and part w0-0" in verify(job.path, job.source).problems[0]
    record.write_text(text.replace('"units": [0', '"units": [1'))
    assert "speaks of units 1 to 2" in verify(job.path, job.source).problems[0]
    record.write_text(text[:50])
    assert f"{record} is damaged" in verify(job.path, job.source).problems[0]
    record.write_text(text)
    (job.path / "published" / "deleted" / f"{gone[0]}.json").unlink()
    assert any(f"{gone[0]}.arrow is missing" in problem for problem in verify(job.path, job.source).problems)


def test_memory_follows_the_unit(tmp_path):
    """Ten times the rows in a range, the same peak of Arrow memory."""
    peaks = []
    usual = pa.default_memory_pool()
    for num_rows in (2_000, 8_000):
        source = FakeSource(((500,) * (num_rows // 500 + 1),))
        job = Run(tmp_path / str(num_rows), source, plan(source, unit_rows=250), commit_every=500)
        job.start()
        counting = pa.proxy_memory_pool(usual)
        pa.set_memory_pool(counting)
        try:
            rolling = publisher(job, Sharding(DatasetFormat.both, range_rows=num_rows))
            assert [one.num_rows for one in rolling.publish()] == [num_rows]
        finally:
            pa.set_memory_pool(usual)
        peaks.append(counting.max_memory())
    assert peaks[1] < 1.3 * peaks[0]


def test_the_command(tmp_path, calm, capsys):
    finalize(calm.path, **CUT)
    job = job_at(tmp_path / "job", max_part_bytes=3_000)
    job.start(30)
    options = [str(job.path), "--rolling", "--delete-parts", "--range-rows", "24", "--shard-bytes", "2000"]
    assert command.main([*options, "--once"]) == 0
    assert not (job.path / "dataset").exists()
    job.start()
    capsys.readouterr()
    assert command.main([str(job.path), "--rolling", "--delete-parts"]) == 0
    out = capsys.readouterr().out
    assert "published units 3 to 5: 24 rows" in out and "deleted part w" in out and "64 rows in " in out
    assert tree(job) == tree(calm)
    for wrong, message in (
        (["--delete-parts"], "--delete-parts goes with --rolling"),
        (["--rolling", "--partial"], "--rolling publishes every row"),
        (["--range-rows", "0"], "--range-rows=0 leaves no room"),
    ):
        assert command.main([str(job.path), *wrong]) == 1
        assert message in capsys.readouterr().err
