"""The flow of one worker, with an engine that needs no model: several at once, stops, errors, idleness."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_jobs import FakeSource, complete, plan

from pipeline.cluster.claims import Claim, Claims
from pipeline.cluster.join import Place, join
from pipeline.cluster.time_limit import TimeLimit
from pipeline.cluster.workers import Member, read_record
from pipeline.config import ClusterConfig, CostConfig, JobConfig, OutputConfig, ParquetSource, PromptConfig
from pipeline.input.rows import RowReader
from pipeline.job import run_worker
from pipeline.output.reader import open_parts
from pipeline.output.verify import verify
from pipeline.output.writer import OutputWriter
from pipeline.report.outcome import Outcome
from pipeline.request import Completion, Request

SOURCE = FakeSource(((40, 40),))


@dataclass
class Stats:
    num_running: int = 0
    num_waiting: int = 0
    kv_use: float = 0.0
    completion_tokens: int = 0
    busy_seconds: float = 0.0


@dataclass
class RowByRow:
    """Makes one row after the other, each in row_s seconds; fails at row number fails_at."""

    row_s: float = 0.0
    fails_at: int | None = None
    stats: Stats = field(default_factory=Stats)

    def generate(
        self,
        requests: Iterable[Request],
        should_stop: Callable[[], bool],
        wanted: Callable[[Request, int], bool],
    ) -> Iterator[Completion]:
        for number, request in enumerate(requests):
            if should_stop():
                return
            if number == self.fails_at:
                raise RuntimeError("the engine died")
            time.sleep(self.row_s)
            for sample in request.samples:
                if wanted(request, sample):
                    yield complete(request.payload.row, sample)


@dataclass
class Job:
    """A WorkerJob of made-up rows."""

    config: JobConfig
    place: Place
    engine: RowByRow
    num_loads: int = 0

    @property
    def member(self) -> Member:
        return self.place.member

    @property
    def claims(self) -> Claims:
        return self.place.claims

    @property
    def limit(self) -> TimeLimit:
        return self.place.limit

    @property
    def num_results(self) -> int:
        return self.place.directory.num_results

    def requests(self, work: Iterable[Claim]) -> Iterator[Request]:
        directory = self.place.directory
        reader = RowReader(SOURCE, directory.order, directory.index.schema.names)
        for claim in work:
            for wanted in claim.ranges():
                yield from (complete(row, 0).request for row in reader.rows(wanted))

    def load_engine(self, start_up: object) -> RowByRow:
        self.num_loads += 1
        return self.engine

    def writer(self) -> OutputWriter:
        record = self.member.record
        return self.place.directory.writer(self.config.output, self.claims, record.incarnation, record.worker)

    def ended(self) -> str | None:
        record = read_record(self.place.directory.store, self.place.directory.path, self.member.incarnation)
        assert record is not None
        return record.ended


def job(path: Path, name: str = "w0", engine: RowByRow | None = None, **changes: object) -> Job:
    config = JobConfig(
        source=ParquetSource(path="unused"),
        prompt=PromptConfig(column="text", prefetch_rows=4),
        output=OutputConfig(dir=str(path), commit_interval_s=0.02),
        cost=CostConfig(gpu_hour_usd=0.0),
        cluster=ClusterConfig(heartbeat_s=0.1, lease_s=30.0, poll_s=0.05),
    )
    for key, value in changes.items():
        setattr(config, key, value)
    return Job(config, join(config, name, time.time(), plan(SOURCE), SOURCE.scan()), engine or RowByRow())


def run(one: Job) -> Outcome:
    return run_worker(one, time.time())


def num_made(outcome: Outcome) -> int:
    return sum(outcome.summary().rows_by_reason.values())


def assert_each_row_once(path: Path) -> None:
    verdict = verify(path, SOURCE)
    assert verdict.complete, verdict.problems
    assert open_parts(path).num_rows == 80


def test_one_worker_makes_the_whole_job_and_a_second_loads_nothing(tmp_path):
    first = job(tmp_path)
    assert run(first).exit_code == 0 and first.ended() == "done"
    assert_each_row_once(tmp_path)
    second = job(tmp_path)
    assert run(second).exit_code == 0 and second.num_loads == 0


def test_four_at_once_share_the_rows(tmp_path):
    """Each ends with 0: the last because all is complete, the others because the rest is with the living."""
    jobs = [job(tmp_path, f"w{number}", RowByRow(row_s=0.004)) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(run, jobs))
    assert [outcome.exit_code for outcome in outcomes] == [0] * 4
    counts = [num_made(outcome) for outcome in outcomes]
    # units are shorter here than a record is old: some may be stolen that were begun, and made twice
    assert 80 <= sum(counts) < 120 and min(counts) > 0
    assert any(outcome.summary().rows_left == 0 for outcome in outcomes)
    assert_each_row_once(tmp_path)


def test_an_engine_that_dies_frees_its_units_at_once(tmp_path):
    failing = job(tmp_path, engine=RowByRow(fails_at=10))
    with pytest.raises(RuntimeError, match="the engine died"):
        run(failing)
    assert open_parts(tmp_path).num_rows == 10 and failing.ended() == "RuntimeError"
    begun = time.monotonic()
    heir = run(job(tmp_path, "w1"))
    assert heir.exit_code == 0 and num_made(heir) == 70
    # well before cluster.lease_s
    assert time.monotonic() - begun < 15
    assert_each_row_once(tmp_path)


def test_a_spent_budget_ends_with_75_and_the_next_goes_on(tmp_path):
    dear = CostConfig(gpu_hour_usd=3600.0, max_usd=0.1)
    outcome = run(job(tmp_path, engine=RowByRow(row_s=0.01), cost=dear))
    assert outcome.exit_code == 75 and outcome.summary().rows_left > 0
    assert run(job(tmp_path, "w1")).exit_code == 0
    assert_each_row_once(tmp_path)


def test_a_time_limit_ends_with_75(tmp_path):
    limited = job(tmp_path, engine=RowByRow(row_s=0.01))
    limited.place = Place(
        limited.place.directory,
        limited.member,
        limited.claims,
        # thirty seconds of it are kept for leaving
        TimeLimit(time.monotonic() + 30.2),
    )
    outcome = run(limited)
    assert outcome.exit_code == 75 and 0 < outcome.summary().rows_left < 80
    assert "time limit" in (outcome.summary().stopped_by or "")


def test_a_worker_that_waits_for_others_stops_when_told_to(tmp_path):
    """The rest is with one who may be dead: to be waited for, unless there is no more money to wait."""
    silent = job(tmp_path, "silent")
    while isinstance(silent.claims.advance(), Claim):
        pass
    waiting = job(tmp_path, "w1", cost=CostConfig(gpu_hour_usd=3600.0, max_usd=0.3))
    begun = time.monotonic()
    outcome = run(waiting)
    assert outcome.exit_code == 75 and waiting.num_loads == 0
    assert time.monotonic() - begun < 10
