"""What a worker, `status` and the books cost as a job grows: files touched, not seconds, so that no machine's
load decides. `benchmarks/cluster_scale.py` has the seconds, for 100,000 units.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cluster_scale import UNITS_PER_WORKER, Measured, files_of, measure_job

SMALL, LARGE = 200, 1000
RATIO = LARGE / SMALL


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, dict[str, Measured]]]:
    found = {}
    for num_units in (SMALL, LARGE):
        folder = tmp_path_factory.mktemp("job")
        found[num_units] = (folder, measure_job(folder, num_units, apart=False))
    return found


def fact(jobs, num_units: int, step: str, name: str):
    return jobs[num_units][1][step].facts[name]


def test_the_jobs_are_what_they_seem(jobs):
    for num_units in (SMALL, LARGE):
        assert fact(jobs, num_units, "plan", "units") == num_units
        assert fact(jobs, num_units, "verify", "problems") == []
        assert fact(jobs, num_units, "is complete", "complete")
        assert fact(jobs, num_units, "status", "done") == num_units * 100


@pytest.mark.parametrize("level", ["0%", "25%", "50%", "75%"])
def test_a_claim_costs_the_same_however_large_the_job_and_however_much_is_taken(jobs, level):
    for num_units in (SMALL, LARGE):
        claims = fact(jobs, num_units, f"claim at {level}", "claims")
        assert claims == max(round(num_units / 200), 1)
        # the lease itself, and the folder that it is in, once
        assert fact(jobs, num_units, f"claim at {level}", "files_per_claim") <= 1 + 1 / claims
        # a look at the names of the leases, a folder of 4096 each
        assert fact(jobs, num_units, f"claim at {level}", "join_files") <= 3


def test_who_finds_nothing_free_reads_by_the_worker_and_not_by_the_unit(jobs):
    for num_units in (SMALL, LARGE):
        # of each worker: its open unit's lease, its record, and its journals, one at each level
        num_workers = num_units / UNITS_PER_WORKER
        files = fact(jobs, num_units, "claim at 100%", "files_per_claim")
        assert fact(jobs, num_units, "claim at 100%", "verdict") == "wait"
        assert files <= 10 * num_workers + 20


def test_status_reads_no_lease_of_a_calm_job(jobs):
    for num_units in (SMALL, LARGE):
        _, steps = jobs[num_units]
        # a record each; of each journal its beginning, its size and its end, twice
        counts = files_of(jobs[num_units][0])
        assert steps["status"].facts["files"] <= 6 * counts["journal"] + counts["workers"] + 10
        assert steps["status"].facts["workers"] == counts["workers"]


def test_the_books_grow_with_the_job_and_no_faster(jobs):
    small, large = (files_of(jobs[num_units][0]) for num_units in (SMALL, LARGE))
    assert large["leases"] == LARGE and small["leases"] == SMALL
    assert large["journal"] <= RATIO * small["journal"]
    for step in ("status", "is complete", "verify"):
        seconds = [jobs[num_units][1][step].cpu_s for num_units in (SMALL, LARGE)]
        # of the processor's time, and twice as generous as linear
        assert seconds[1] < 2 * RATIO * max(seconds[0], 0.02), step
