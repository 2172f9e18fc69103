"""Finalising: one dataset per job, whatever its history; what it refuses; who can open it."""

from __future__ import annotations

import errno
import json
import os

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_jobs import Crash, Disk, FakeSource, Run, plan

from pipeline import durable
from pipeline import finalize as command
from pipeline.durable import FullDisk
from pipeline.output.dataset import DatasetFormat
from pipeline.output.finalize import Selection, finalize
from pipeline.output.layout import part_path
from pipeline.output.shards import rebatch
from pipeline.output.verify import verify

OPTIONS = {"completion_ids": True, "logprobs": True, "topk": 2}


def tree(job: Run) -> dict[str, bytes]:
    folder = job.path / "dataset"
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def made(path, *stops: int | None, files=((40, 10), (14,)), **options) -> Run:
    source = FakeSource(files)
    job = Run(path, source, plan(source, samples=2, **OPTIONS), **options)
    for stop in stops or (None,):
        job.start(stop)
    return job


def test_history_leaves_no_trace(tmp_path):
    """Interruptions, sizes of parts and commits, errors retried: the same bytes, both forms."""
    calm = made(tmp_path / "calm", commit_every=50)
    broken = made(tmp_path / "broken", 3, 17, 40, None, commit_every=2, max_part_bytes=9_000)
    retried = made(tmp_path / "retried", failing=lambda ordinal: ordinal % 5 == 1)
    retried.failing, retried.retry_errors = (lambda ordinal: False), True
    retried.start()
    for job in (calm, broken, retried):
        finalize(job.path, DatasetFormat.both)
    assert tree(calm) == tree(broken) == tree(retried)
    assert len(list((broken.path / "parts").iterdir())) > 4


def test_finalising_again_changes_nothing(tmp_path):
    job = made(tmp_path / "job")
    finalize(job.path)
    before = tree(job)
    finalize(job.path)
    assert tree(job) == before
    assert sorted(p.name for p in job.path.iterdir() if "dataset" in p.name) == ["dataset"]


def test_datasets_opens_it_in_the_order_of_the_input(tmp_path):
    job = made(tmp_path / "job", 30, None)
    done = finalize(job.path)
    rows = datasets.load_from_disk(str(done.path))
    assert done.num_rows == len(rows) == 128
    keys = list(zip(rows["file"], rows["row"], rows["sample"], strict=True))
    assert keys == sorted(keys) and len(set(keys)) == 128
    assert rows[3]["text"] == "text 0/1" and rows[3]["sample"] == 1
    assert rows[8]["topk_ids"] == [[0, 1], [1, 2]]
    assert rows.features["topk_logprobs"].feature.length == 2


def test_parquet_readers_open_it_too(tmp_path):
    job = made(tmp_path / "job")
    finalize(job.path, DatasetFormat.both)
    table = pq.read_table(job.path / "dataset" / "parquet")
    arrow = datasets.load_from_disk(str(job.path / "dataset")).with_format("arrow")[:]
    assert table.num_rows == 128
    assert table.drop_columns(["score"]).to_pylist() == arrow.drop_columns(["score"]).to_pylist()
    finalize(job.path, DatasetFormat.parquet)
    assert [name for name in tree(job) if name != "README.md"] == ["parquet/data-00000-of-00001.parquet"]


def test_rows_of_a_shuffled_job_come_in_its_order(tmp_path):
    source = FakeSource(((300,),))
    jobs = [Run(tmp_path / name, source, plan(source, shuffle=True)) for name in "ab"]
    jobs[0].start()
    jobs[1].start(100)
    jobs[1].start()
    for job in jobs:
        finalize(job.path)
    assert tree(jobs[0]) == tree(jobs[1])
    rows = datasets.load_from_disk(str(jobs[0].path / "dataset"))["row"]
    assert sorted(rows) == list(range(300)) and list(rows) != list(range(300))


def test_an_empty_job_is_an_empty_dataset(tmp_path):
    for number, files in enumerate(((), ((0,),))):
        job = made(tmp_path / str(number), files=files)
        assert finalize(job.path, DatasetFormat.both).num_rows == 0
        rows = datasets.load_from_disk(str(job.path / "dataset"))
        assert len(rows) == 0 and "completion" in rows.column_names
        assert pq.read_table(job.path / "dataset" / "parquet").num_rows == 0
        assert verify(job.path, job.source).complete


def test_an_unfinished_job_is_refused_or_taken_in_part(tmp_path):
    job = made(tmp_path / "job", 31, commit_every=10)
    with pytest.raises(ValueError, match="30 of 128 results.*--partial"):
        finalize(job.path)
    assert not (job.path / "dataset").exists()
    assert finalize(job.path, selection=Selection(partial=True)).num_rows == 30
    assert "**Partial**" in (job.path / "dataset" / "README.md").read_text()
    job.start()
    finalize(job.path)
    assert len(datasets.load_from_disk(str(job.path / "dataset"))) == 128


def test_failed_rows_stay_unless_they_are_to_go(tmp_path):
    job = made(tmp_path / "job", failing=lambda ordinal: ordinal == 3)
    assert finalize(job.path).num_rows == 128
    done = finalize(job.path, selection=Selection(drop_failed=True))
    rows = datasets.load_from_disk(str(done.path))
    # rows 10, 21, 32, 43 of the first file and 10 of the second were skipped
    assert len(rows) == 128 - 2 * (1 + 5)
    assert set(rows["finish_reason"]) == {"stop"}
    assert verify(job.path, job.source).complete


def test_damaged_parts_are_never_compacted(tmp_path):
    job = made(tmp_path / "job")
    path = part_path(job.path, "w0-00000")
    data = bytearray(path.read_bytes())
    place = bytes(data).index(b"said RowKey(file=0, row=1)")
    data[place] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"w0-00000.arrow was altered: bytes .*pipeline.verify"):
        finalize(job.path)


def test_parts_of_another_job_are_refused(tmp_path):
    job = made(tmp_path / "job")
    source = FakeSource(((4,),))
    other = Run(tmp_path / "other", source, plan(source, samples=2, fingerprint={"seed": 1}, **OPTIONS))
    other.start()
    for folder, suffix in (("parts", "arrow"), ("journal", "jsonl")):
        text = (other.path / folder / f"w0-00000.{suffix}").read_bytes()
        (job.path / folder / f"w9-00000.{suffix}").write_bytes(text.replace(b"w0-00000", b"w9-00000"))
    with pytest.raises(ValueError, match="w9-00000.arrow belongs to another job .*; seed: .absent. → 1"):
        finalize(job.path)


def test_shards_end_at_their_size(tmp_path):
    job = made(tmp_path / "job", files=((2500,),), commit_every=500)
    done = finalize(job.path, DatasetFormat.both, shard_bytes=100_000)
    names = [path.name for path in done.files if path.suffix == ".arrow"]
    assert names == [f"data-{i:05d}-of-00005.arrow" for i in range(5)]
    assert len(datasets.load_from_disk(str(done.path))) == 5000
    assert verify(job.path, job.source).complete


def test_row_groups_have_one_size(tmp_path):
    job = made(tmp_path / "job", files=((1250,),), commit_every=300)
    done = finalize(job.path, DatasetFormat.parquet)
    metadata = pq.read_metadata(done.files[0])
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [1000, 1000, 500]


def test_a_crash_anywhere_leaves_the_old_dataset_or_the_new(tmp_path, monkeypatch):
    job = made(tmp_path / "job", 31, commit_every=10)
    finalize(job.path, selection=Selection(partial=True))
    job.start()
    for crash_at in range(10_000):
        with monkeypatch.context() as patch:
            Disk(patch, job.path, crash_at)
            try:
                finalize(job.path, shard_bytes=20_000, range_rows=50)
            except Crash:
                pass
            else:
                break
        if (job.path / "dataset").exists():
            assert len(datasets.load_from_disk(str(job.path / "dataset"))) in (30, 128)
    assert crash_at > 20
    assert verify(job.path, job.source).complete


def test_a_full_disk_leaves_no_half_of_a_dataset(tmp_path, monkeypatch):
    job = made(tmp_path / "job")
    real = durable.write
    written = 0

    def failing(descriptor, data):
        nonlocal written
        written += len(bytes(data))
        if written > 5_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, data)

    monkeypatch.setattr(durable, "write", failing)
    for form in DatasetFormat:
        written = 0
        with pytest.raises(FullDisk, match="output.dir="):
            finalize(job.path, form)
        assert [p.name for p in job.path.iterdir() if "dataset" in p.name] == []
    monkeypatch.setattr(durable, "write", real)
    assert finalize(job.path).num_rows == 128


def test_a_second_one_takes_over_from_one_at_work(tmp_path, monkeypatch):
    """At each rename of the first: it ends with a word, the other's dataset is whole; or it comes last."""
    job = made(tmp_path / "job")
    finalize(job.path)
    expected, real = tree(job), durable.rename
    outcomes = []
    for moment in range(8):
        seen = [0]

        def rename(source, target, moment=moment, seen=seen):
            seen[0] += 1
            if seen[0] == moment + 1:
                finalize(job.path)
            real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(durable, "rename", rename)
            try:
                finalize(job.path)
                outcomes.append("done")
            except ValueError as error:
                assert f"another finalize began on {job.path} after this one" in str(error)
                outcomes.append("refused")
        assert tree(job) == expected
        assert [p.name for p in job.path.iterdir() if "dataset" in p.name] == ["dataset"]
    assert "refused" in outcomes and outcomes[-1] == "done"


def test_what_a_killed_one_left_goes_with_the_next(tmp_path, monkeypatch):
    job = made(tmp_path / "job")
    with monkeypatch.context() as patch:
        Disk(patch, job.path, crash_at=6)
        with pytest.raises(Crash):
            finalize(job.path)
    assert any(p.name.startswith(".dataset.") for p in job.path.iterdir())
    finalize(job.path)
    assert [p.name for p in job.path.iterdir() if "dataset" in p.name] == ["dataset"]


def test_ranges_begin_new_files_in_both_forms(tmp_path):
    job = made(tmp_path / "job", files=((40, 10), (14,)))
    done = finalize(job.path, DatasetFormat.both, range_rows=48)
    names = [path.name for path in done.files if path.suffix == ".arrow"]
    assert names == [f"data-{i:05d}-of-00003.arrow" for i in range(3)]
    assert [pq.read_metadata(path).num_rows for path in done.files[3:]] == [48, 48, 32]
    assert verify(job.path, job.source).complete


def test_batches_do_not_depend_on_how_rows_arrive():
    table = pa.table({"x": pa.array([None if i % 3 else f"v{i}" for i in range(2500)])})
    sizes = ([2500], [1, 999, 1500], [300] * 9)
    results = []
    for lengths in sizes:
        pieces, begin = [], 0
        for length in lengths:
            pieces.append(table.slice(begin, length))
            begin += length
        results.append([batch.serialize().to_pybytes() for batch in rebatch(pieces, table.schema)])
    assert results[0] == results[1] == results[2] and len(results[0]) == 3


def test_the_card_and_metadata_tell_where_it_came_from(tmp_path):
    job = made(tmp_path / "job")
    done = finalize(job.path)
    text = (done.path / "README.md").read_text()
    assert (
        'data_files: "data-*.arrow"' in text and "sampling.temperature" in text and "| `completion` |" in text
    )
    schema = pa.ipc.open_stream(done.files[0].read_bytes()).schema
    facts = json.loads(schema.metadata[b"tokenmill"])
    assert facts["version"] == "0.1.0" and facts["input"] == job.source.scan().digest
    assert json.loads(facts["settings"]) == {"sampling.temperature": 0.7}
    assert facts["finalize"] == {"drop_failed": False, "partial": False}


def test_the_command_ends_with_codes_for_the_shell(tmp_path, capsys):
    job = made(tmp_path / "job", 31, commit_every=10)
    assert command.main([str(job.path)]) == 1
    assert "not complete" in capsys.readouterr().err
    assert command.main([str(job.path), "--partial", "--format", "both", "--drop-failed"]) == 0
    assert "rows in 2 files" in capsys.readouterr().out
    assert command.main([str(tmp_path / "nothing")]) == 1
    assert "holds no job" in capsys.readouterr().err


def test_memory_follows_the_unit_and_not_the_job(tmp_path):
    """Ten times the rows, the same peak of Arrow memory in finalize and verify."""
    peaks = []
    usual = pa.default_memory_pool()
    for num_rows in (4_000, 40_000):
        source = FakeSource(((2_000,) * (num_rows // 2_000),))
        job = Run(tmp_path / str(num_rows), source, plan(source, unit_rows=500), commit_every=1_000)
        job.start()
        counting = pa.proxy_memory_pool(usual)
        pa.set_memory_pool(counting)
        try:
            finalize(job.path, DatasetFormat.both)
            assert verify(job.path, source).complete
        finally:
            pa.set_memory_pool(usual)
        peaks.append(counting.max_memory())
    assert peaks[1] < 1.3 * peaks[0]
