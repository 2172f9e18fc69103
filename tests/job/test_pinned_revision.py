"""A job keeps the commit of the model that it found at its first start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from real_jobs import OWN_JOB, TINY_MODEL, CommandServer

OLD, NEW = "a" * 40, "b" * 40
NAME = "someone/tiny"


@pytest.fixture
def cache(commands: CommandServer) -> Path:
    """The hub's cache as the commands see it: two commits of one repository, `main` at the old one."""
    folder = commands._folder / "hub" / "models--someone--tiny"
    shutil.rmtree(folder, ignore_errors=True)
    for commit in (OLD, NEW):
        shutil.copytree(TINY_MODEL, folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    point(folder, OLD)
    return folder


def point(cache: Path, commit: str) -> None:
    (cache / "refs" / "main").write_text(commit)


def test_a_branch_that_moved_does_not_change_the_job(
    commands: CommandServer, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 3 + 4?"}\n{"prompt": "What is 5 + 5?"}\n')
    job = (*OWN_JOB, "source=jsonl", "source.path=rows.jsonl", f"model.path={NAME}", "output.dir=out")
    first = commands.run(*job, "source.limit=1", cwd=tmp_path)
    assert first.code == 0, first.err
    stored = json.loads((tmp_path / "out" / "job.json").read_text())
    assert stored["fingerprint"]["model.revision"] == OLD
    assert (stored["provenance"]["revision"], stored["provenance"]["commit"]) == (None, OLD)
    assert f"{NAME} at {OLD[:12]}" in first.err

    point(cache, NEW)
    again = commands.run(*job, "source.limit=1", cwd=tmp_path)
    assert again.code == 0 and f"{NAME} at {OLD[:12]}" in again.err, again.err
    # The old commit by its name is the same job; the branch by its name, where it is now, is another.
    assert commands.run(*job, "source.limit=1", f"model.revision={OLD}", cwd=tmp_path).code == 0
    asked = commands.run(*job, "source.limit=1", "model.revision=main", cwd=tmp_path)
    assert asked.code == 1 and f"model.revision: {OLD} → {NEW}" in asked.err

    # A commit that is gone is missed, not replaced.
    shutil.rmtree(cache / "snapshots" / OLD)
    gone = commands.run(*job, "source.limit=1", cwd=tmp_path)
    assert gone.code == 1 and f"model.path={NAME}" in gone.err and gone.err.count("\n") == 1


def test_a_name_that_is_not_in_the_cache(commands: CommandServer, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi"}\n')
    job = (*OWN_JOB, "source=jsonl", "source.path=rows.jsonl", "output.dir=out")
    ended = commands.run(*job, "model.path=nobody/nothing", cwd=tmp_path)
    assert (ended.code, ended.out) == (1, "") and ended.err.count("\n") == 1
    assert "model.path=nobody/nothing" in ended.err and "tokenmill prefetch" in ended.err
    assert not (tmp_path / "out" / "job.json").exists()
