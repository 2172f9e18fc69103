"""Parts: committed rows and no others, full disks, roll-over, every reader's eye on a closed part."""

from __future__ import annotations

import errno
import os

import datasets
import pyarrow as pa
import pytest
from fake_jobs import FakeSource, Run, plan

import pipeline
from pipeline import durable
from pipeline.durable import FullDisk
from pipeline.output.journal import Closed, Commit, read
from pipeline.output.layout import (
    journal_names,
    journal_path,
    part_name,
    part_names,
    part_path,
    split_part_name,
)
from pipeline.output.part import END_OF_STREAM
from pipeline.output.reader import open_parts
from pipeline.output.verify import verify


def run(path, **options) -> Run:
    source = FakeSource()
    return Run(path, source, options.pop("plan", None) or plan(source), **options)


def test_readers_see_committed_rows_only(tmp_path):
    job = run(tmp_path / "job", commit_every=3)
    job.start(stop_after=7)
    path = part_path(job.path, part_names(job.path)[0])
    with open(path, "ab") as file:
        file.write(b"half a message")
    assert open_parts(job.path).num_rows == 6
    assert sum(batch.num_rows for batch in open_parts(job.path)) == 6
    assert pipeline.open_parts(str(job.path)).to_table().column("row").to_pylist() == list(range(6))


def test_a_closed_part_is_a_whole_stream_for_any_reader(tmp_path):
    job = run(tmp_path / "job")
    job.start()
    path = part_path(job.path, part_names(job.path)[0])
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table.num_rows == 32
    assert datasets.Dataset.from_file(str(path)).num_rows == 32
    assert isinstance(list(read(journal_path(job.path, part_names(job.path)[0])))[-1], Closed)


def test_each_commit_says_which_units_it_holds(tmp_path):
    job = run(tmp_path / "job", commit_every=6)
    job.start()
    commits = [e for e in read(journal_path(job.path, "w0-00000")) if isinstance(e, Commit)]
    assert [[tuple(unit) for unit in commit.units] for commit in commits[:2]] == [
        [(0, 4, 0, 0), (1, 2, 0, 0)],
        [(1, 2, 0, 0), (2, 4, 0, 0)],
    ]
    assert commits[-1].totals.rows == 32
    assert commits[-1].totals.skipped == 2


def test_parts_roll_over_before_the_limit(tmp_path):
    job = run(tmp_path / "job", max_part_bytes=8_000)
    job.start()
    sizes = [part_path(job.path, name).stat().st_size for name in part_names(job.path)]
    assert len(sizes) > 2 and max(sizes) <= 8_000 + len(END_OF_STREAM)
    assert verify(job.path, job.source).complete


def test_a_commit_larger_than_a_part_still_goes_in(tmp_path):
    job = run(tmp_path / "job", max_part_bytes=1)
    job.start()
    assert len(part_names(job.path)) == 32
    assert verify(job.path, job.source).complete


def test_each_start_has_a_part_of_its_own(tmp_path):
    job = run(tmp_path / "job")
    job.start(stop_after=4)
    before = part_path(job.path, "w0-00000").read_bytes()
    job.start(stop_after=4)
    assert part_names(job.path) == ["w0-00000", "w1-00000"] == journal_names(job.path)
    assert part_path(job.path, "w0-00000").read_bytes() == before


def test_the_name_of_a_part_says_whose_it_is():
    for incarnation in ("w0", "host-12.3f", "node-7.some.where-99.0a1b2c3d"):
        assert split_part_name(part_name(incarnation, 7)) == (incarnation, 7)
    for stray in ("w0", "-00001", "w0-", "w0-x"):
        with pytest.raises(ValueError, match="is no name of a part"):
            split_part_name(stray)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("operation", ["write", "fsync_file", "create"])
def test_a_full_disk_names_the_key_and_keeps_what_was_committed(tmp_path, monkeypatch, number, operation):
    """At any call: whatever could not be written is generated again, all else stays as it is."""
    calls = 0
    real = getattr(durable, operation)
    for fail_at in range(400):
        job = run(tmp_path / str(fail_at), commit_every=4, max_part_bytes=12_000)
        calls = 0

        def failing(first, *rest, fail_at=fail_at):
            nonlocal calls
            calls += 1
            if calls > fail_at:
                if operation == "write":
                    # a full disk takes a piece of what it is given
                    os.write(first, bytes(rest[0])[: len(bytes(rest[0])) // 2])
                raise OSError(number, os.strerror(number))
            return real(first, *rest)

        monkeypatch.setattr(durable, operation, failing)
        try:
            job.start()
        except FullDisk as error:
            assert error.errno == number
            assert f"output.dir={job.path}" in str(error) and "free some space" in str(error)
        else:
            assert calls <= fail_at
            break
        finally:
            monkeypatch.setattr(durable, operation, real)
        before = _committed(job)
        sizes = {name: part_path(job.path, name).stat().st_size for name in part_names(job.path)}
        made = job.start()
        assert len(made) == 32 - before
        assert all(part_path(job.path, name).stat().st_size == size for name, size in sizes.items())
        assert verify(job.path, job.source).complete
    else:
        pytest.fail("the job never came to its end")
    assert fail_at >= 5


def _committed(job: Run) -> int:
    if not (job.path / "job.json").exists():
        return 0
    return open_parts(job.path).num_rows


def test_other_errors_of_the_disk_keep_their_words(tmp_path):
    with pytest.raises(OSError, match="Input/output") as caught, durable.full_disk_named(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    assert not isinstance(caught.value, FullDisk)


def test_a_damaged_part_is_named_with_the_remedy(tmp_path):
    job = run(tmp_path / "job")
    job.start()
    path = part_path(job.path, "w0-00000")
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(
        ValueError, match=r"w0-00000\.arrow ends at byte .*delete it and journal/w0-00000\.jsonl"
    ):
        open_parts(job.path).to_table()
    path.unlink()
    with pytest.raises(ValueError, match=r"w0-00000\.arrow is missing"):
        open_parts(job.path).to_table()
