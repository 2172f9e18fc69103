"""What reads every byte of a remote job reads a copy of it, and what it makes goes back in order."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_jobs import FakeSource, Worker, complete, plan
from fsspec.implementations.memory import MemoryFileSystem

from pipeline.output.finalize import finalize
from pipeline.output.layout import DATASET
from pipeline.output.progress import JobDirectory
from pipeline.output.remote_copy import local_copy, publish, renamed
from pipeline.output.verify import verify
from pipeline.store import local_folder
from pipeline.stores.remote import RemoteStore


@pytest.fixture
def job() -> Iterator[str]:
    """A finished job of 32 rows in fsspec's memory."""
    url = f"memory://job-{secrets.token_hex(4)}"
    source = FakeSource()
    worker = Worker.on(JobDirectory.open(url, plan(source), source.scan()), source, "w0")
    for row, sample in worker.rows():
        assert worker.writer.append(complete(row, sample))
        worker.writer.commit()
    worker.writer.close()
    yield url
    MemoryFileSystem().rm(url, recursive=True)


def test_a_copy_is_a_job_as_any_other_and_gone_afterwards(job: str, tmp_path: Path) -> None:
    with local_copy(job, str(tmp_path)) as copy:
        assert copy.is_relative_to(local_folder(job, str(tmp_path)))
        verdict = verify(copy, FakeSource())
        assert verdict.complete and verdict.num_results == 32
        assert renamed(f"{copy}/parts", copy, job) == f"{job}/parts"
        with pytest.raises(ValueError, match=f"^{job} is wrong"), local_copy(job) as other:
            raise ValueError(f"{other} is wrong")
    assert not copy.exists() and not other.exists()


def test_what_is_made_in_a_copy_is_verified_in_the_next(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    upload = RemoteStore.upload

    def watched(self: RemoteStore, source: Path, path: Path) -> None:
        sent.append(path.suffix)
        upload(self, source, path)

    monkeypatch.setattr(RemoteStore, "upload", watched)
    MemoryFileSystem().pipe_file(f"{job}/{DATASET}/data-00007-of-00008.arrow", b"of an earlier one")
    with local_copy(job, str(tmp_path)) as copy:
        finalize(copy)
        publish(copy, job, DATASET)
    # a folder without its metadata is no dataset: nobody opens half of one
    assert sorted(sent) == [".arrow", ".json", ".json", ".md"] and sent[-2:] == [".json", ".json"]
    with local_copy(job, str(tmp_path)) as copy:
        verdict = verify(copy, FakeSource())
        assert verdict.complete and verdict.has_dataset
        assert not (copy / DATASET / "data-00007-of-00008.arrow").exists()


def test_a_local_job_is_its_own_copy(tmp_path: Path) -> None:
    with local_copy(tmp_path) as copy:
        assert copy == tmp_path
        publish(copy, tmp_path, DATASET)
    assert tmp_path.exists() and renamed(f"{copy}/x", copy, "other") == f"{copy}/x"


def test_a_url_without_a_job_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^memory://nothing-here holds no job"):
        with local_copy("memory://nothing-here", str(tmp_path)):
            pass
