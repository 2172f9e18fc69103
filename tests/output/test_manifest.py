"""The manifest: what was found, in the same bytes every time, whether or not parts are still there."""

from __future__ import annotations

import hashlib
import json

import pytest
from fake_jobs import FakeSource, Run, plan

from pipeline import verify as command
from pipeline.cluster.publish import Publisher
from pipeline.output.dataset import Sharding
from pipeline.output.finalize import finalize
from pipeline.output.journal import Commit, read
from pipeline.output.layout import journal_path, part_path
from pipeline.output.manifest import write_manifest
from pipeline.output.progress import JobDirectory
from pipeline.output.reader import open_parts
from pipeline.output.verify import verify


@pytest.fixture
def job(tmp_path) -> Run:
    """Errors mended by a second start, parts of several sizes."""
    source = FakeSource(((30, 5), (7,)))
    made = Run(
        tmp_path / "job",
        source,
        plan(source, samples=2),
        failing=lambda ordinal: ordinal in (3, 40),
        max_part_bytes=4_000,
    )
    made.start(40)
    made.start()
    made.failing, made.retry_errors = (lambda ordinal: ordinal == 40), True
    made.start()
    return made


def manifest(job: Run) -> dict:
    path = job.path / "found.json"
    write_manifest(job.path, verify(job.path, job.source), path)
    return json.loads(path.read_text())


def test_it_counts_what_is_there(job):
    found = manifest(job)
    directory = JobDirectory.load(job.path)
    rows = open_parts(job.path).to_table().to_pylist()
    assert found["complete"] and found["problems"] == 0
    assert (found["rows"], found["samples"], found["results"]) == (42, 2, 84)
    assert found["fingerprint"] == directory.plan.digest and found["input"] == directory.index.digest
    assert found["errors"] == sum(row["finish_reason"] == "error" for row in rows) == 2
    assert found["skipped"] == sum(row["finish_reason"] == "skipped" for row in rows) > 0
    for tokens in ("prompt_tokens", "completion_tokens"):
        assert found[tokens] == sum(row[tokens] for row in rows)
    # two errors mended, two made again and failed again
    assert found["void_rows"] == 4
    for key in ("results", "errors", "skipped", "prompt_tokens", "completion_tokens", "void_rows"):
        assert found[key] == sum(part[key] for part in found["parts"])
    assert found["dataset"] is None


def test_each_part_is_named_with_its_hash(job):
    parts = manifest(job)["parts"]
    assert len(parts) > 3 and [part["part"] for part in parts] == sorted(part["part"] for part in parts)
    for part in parts:
        commits = [e for e in read(journal_path(job.path, part["part"])) if isinstance(e, Commit)]
        data = part_path(job.path, part["part"]).read_bytes()[: commits[-1].offset]
        assert part["bytes"] == len(data) and part["sha256"] == hashlib.sha256(data).hexdigest()
        assert part["results"] + part["void_rows"] == sum(commit.rows for commit in commits)
        assert part["incarnation"] == part["worker"] == part["part"].partition("-")[0]
        assert part["deleted"] is False


def test_the_files_of_the_dataset_are_hashed(job):
    folder = finalize(job.path, range_rows=20).path
    files = {entry["file"]: entry for entry in manifest(job)["dataset"]}
    assert {"data-00000-of-00005.arrow", "state.json", "dataset_info.json", "README.md"} <= files.keys()
    for name, entry in files.items():
        data = (folder / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


def test_deleted_parts_stay_in_it_as_they_were(job):
    before = manifest(job)
    rolling = Publisher(JobDirectory.load(job.path), Sharding(range_rows=20))
    list(rolling.publish())
    gone = set(rolling.delete_parts())
    after = manifest(job)
    assert gone and gone == {part["part"] for part in after["parts"] if part["deleted"]}
    for part in after["parts"]:
        part["deleted"] = False
    assert after == before


def test_the_command_writes_the_same_bytes_again(job, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "verify", lambda path: verify(path, job.source))
    assert command.main([str(job.path), "--manifest"]) == 0
    first = (job.path / "manifest.json").read_bytes()
    assert command.main([str(job.path), "--manifest", str(tmp_path / "m.json")]) == 0
    assert (tmp_path / "m.json").read_bytes() == first
    assert "4 rows made again or too late" in capsys.readouterr().out
    part = part_path(job.path, "w0-00000")
    part.write_bytes(part.read_bytes()[:-300])
    assert command.main([str(job.path), "--manifest"]) == 1
    found = json.loads((job.path / "manifest.json").read_text())
    assert found["complete"] is False and found["problems"] > 0
    assert command.main([str(job.path)]) == 1
