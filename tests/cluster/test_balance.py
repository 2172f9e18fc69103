"""How well unlike workers share a job: one is killed, one is five times slower, one joins late.

Rows sleep, so that a busy machine disturbs little. The ideal is a job that is cut as finely as one likes
and loses nothing: work / speeds, from the moment each worker is ready.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster.stub_server import Running, StubServer

from pipeline.output import journal
from pipeline.output.journal import Commit
from pipeline.output.progress import JobDirectory
from pipeline.output.verify import verify

pytestmark = [pytest.mark.faults, pytest.mark.slow]

NUM_ROWS = 280
ROW_S = 0.1
SLOWER = 5
LATE_S, KILLED_S = 4.0, 5.0
MOST = 1.15


@pytest.fixture
def server() -> Iterator[StubServer]:
    with StubServer() as running:
        yield running


def test_four_unlike_workers_need_little_more_than_the_ideal(server: StubServer, tmp_path: Path) -> None:
    questions = [f"question {number}" for number in range(NUM_ROWS)]
    pq.write_table(pa.table({"question": questions}), tmp_path / "rows.parquet")
    job = tmp_path / "job"

    def start(row_s: float) -> Running:
        return server.start(
            "source=parquet",
            f"source.path={tmp_path}/rows.parquet",
            "prompt.column=question",
            "source.unit_rows=2",
            "prompt.prefetch_rows=4",
            f"output.dir={job}",
            "output.commit_interval_s=0.3",
            "cluster.heartbeat_s=0.3",
            "cluster.lease_s=2",
            "cluster.poll_s=0.1",
            row_s=row_s,
        )

    steady, victim, slow = start(ROW_S), start(ROW_S), start(SLOWER * ROW_S)
    time.sleep(LATE_S)
    late = start(ROW_S)
    time.sleep(KILLED_S - LATE_S)
    killed = time.time()
    victim.send(signal.SIGKILL)
    codes = [running.wait() for running in (steady, victim, slow, late)]
    assert codes == [0, -signal.SIGKILL, 0, 0], [steady.err, slow.err, late.err]

    verdict = verify(job)
    assert verdict.complete and verdict.num_results == NUM_ROWS, verdict.problems
    end, num_made = last_commit(job)
    ready = {running.pid: loaded(job, running.pid) for running in (steady, victim, slow, late)}
    speeds = [(ready[slow.pid], None, 1 / (SLOWER * ROW_S)), (ready[victim.pid], killed, 1 / ROW_S)]
    speeds += [(ready[running.pid], None, 1 / ROW_S) for running in (steady, late)]
    begin = min(ready.values())
    ideal = time_needed(NUM_ROWS, speeds) - begin
    print(
        f"\nideal {ideal:.2f} s, took {end - begin:.2f} s ({(end - begin) / ideal:.3f}); {num_made} rows made"
    )
    # what the killed worker had not committed is all that is made again
    assert num_made == NUM_ROWS
    assert end - begin <= MOST * ideal


def time_needed(work: float, speeds: list[tuple[float, float | None, float]]) -> float:
    """When work rows are made by workers (from, until, rows a second)."""
    moments = sorted({edge for begin, until, _ in speeds for edge in (begin, until) if edge is not None})
    for now, following in zip(moments, [*moments[1:], None], strict=True):
        speed = sum(s for begin, until, s in speeds if begin <= now and (until is None or now < until))
        if speed and (following is None or now + work / speed <= following):
            return now + work / speed
        assert following is not None, "nobody works"
        work -= speed * (following - now)
    raise AssertionError("unreachable")


def last_commit(job: Path) -> tuple[float, int]:
    """When the last row was safe, and how many were made in all."""
    directory = JobDirectory.load(job)
    lines = [entry for path in (job / "journal").iterdir() for entry in journal.read(path)]
    commits = [entry for entry in lines if isinstance(entry, Commit)]
    assert directory.stored().ledger.num_results == NUM_ROWS
    return max(commit.time for commit in commits), sum(commit.rows for commit in commits)


def loaded(job: Path, pid: int) -> float:
    records = [json.loads(path.read_text()) for path in (job / "workers").glob("*.json")]
    return next(float(record["loaded"]) for record in records if record["process"]["pid"] == pid)
