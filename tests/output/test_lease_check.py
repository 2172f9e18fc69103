"""Verify and leases: chains must be whole, commits of those who held the unit; late ones are no fault."""

from __future__ import annotations

import json

import pytest
from fake_jobs import FakeSource, Run, Worker, complete, plan

from pipeline.output.chains import Leases
from pipeline.output.layout import journal_path, lease_path, part_path
from pipeline.output.progress import JobDirectory
from pipeline.output.verify import verify


@pytest.fixture
def job(tmp_path) -> Run:
    """Killed in the middle of a unit, gone on with by another: unit 5 changed hands."""
    source = FakeSource()
    made = Run(tmp_path / "job", source, plan(source), commit_every=1)
    made.start(stop_after=6)
    made.start()
    return made


def changed_hands(job: Run) -> list[int]:
    directory = JobDirectory.load(job.path)
    fences = Leases(directory.store, job.path).fences(len(directory.units))
    return [unit for unit, fence in enumerate(fences.tolist()) if fence > 0]


def problems(job: Run) -> str:
    verdict = verify(job.path, job.source)
    assert not verdict.complete
    return "\n".join(verdict.problems)


def test_units_that_changed_hands_are_no_problem(job):
    assert changed_hands(job)
    assert verify(job.path, job.source).complete


def test_a_gap_in_a_chain_is_named(job):
    path = lease_path(job.path, changed_hands(job)[0], 0)
    path.unlink()
    assert f"lease {path} is missing" in problems(job)


def test_a_damaged_lease_is_named_whether_or_not_it_matters(job):
    taken = changed_hands(job)[0]
    calm = next(unit for unit in range(8) if unit not in changed_hands(job))
    for unit, fence in ((taken, 0), (taken, 1), (calm, 0)):
        path = lease_path(job.path, unit, fence)
        text = path.read_text()
        path.write_text(text[: len(text) // 2])
        assert f"lease {path} is damaged" in problems(job)
        path.write_text(text)
    lease_path(job.path, calm, 0).with_name("notes.txt").write_text("mine")
    assert "notes.txt is no lease" in problems(job)


def test_rows_without_a_lease_are_named(job):
    path = lease_path(job.path, 0, 0)
    path.unlink()
    assert f"lease {path} is missing: restore the file" in problems(job)


def test_a_commit_of_one_who_never_held_the_unit_is_named(job):
    path = lease_path(job.path, 0, 0)
    fields = json.loads(path.read_text())
    holder = fields["incarnation"]
    path.write_text(json.dumps({**fields, "incarnation": "w7"}))
    text = problems(job)
    assert f"part {holder}-00000 holds rows of unit 0, which {holder} never held" in text


def test_late_commits_are_counted_and_no_fault(tmp_path):
    """A worker thought dead commits after its unit was taken over: void, and said so."""
    source = FakeSource()
    job = Run(tmp_path / "job", source, plan(source), commit_every=1)
    slow = Worker.on(JobDirectory.open(job.path, job.plan, source.scan()), source, "slow")
    rows = slow.rows()
    row, sample = next(rows)
    slow.writer.append(complete(row, sample))
    slow.writer.commit()
    late = next(rows)
    job.start()
    slow.writer.append(complete(*late))
    # as if it had looked for its lease just before
    slow.claims.lost = lambda leases: set()
    slow.writer.close()
    verdict = verify(job.path, source)
    assert verdict.complete and verdict.num_results == 32 and verdict.num_void == 1
    assert {part.name: (part.counted.rows, part.num_void) for part in verdict.parts} == {
        "slow-00000": (1, 1),
        "w1-00000": (31, 0),
    }


def test_a_part_of_another_job_is_told_by_its_settings(tmp_path, job):
    source = FakeSource(((4,),))
    settings = {"sampling.temperature": 0.9, "seed": 3}
    other = Run(tmp_path / "other", source, plan(source, fingerprint=settings))
    other.start()
    for path in (part_path, journal_path):
        data = path(other.path, "w0-00000").read_bytes()
        path(job.path, "w9-00000").write_bytes(data.replace(b"w0", b"w9"))
    assert "sampling.temperature: 0.7 → 0.9; seed: (absent) → 3" in problems(job)
