"""Status: sums, speeds, money and the time left, from the ends of journals."""

from __future__ import annotations

import json

import pytest
from fake_jobs import FakeSource, Run, plan

from pipeline import status as command
from pipeline.output.layout import journal_names
from pipeline.report.status import Count, PartProgress, measure, render


def part(worker="w0", started=0.0, usd=3600.0, points=(), whole=True, closed=None) -> PartProgress:
    return PartProgress(worker, started, usd, tuple(points), whole, closed)


def point(time: float, results: int, tokens: int) -> tuple[float, Count]:
    return time, Count(results=results, completion_tokens=tokens)


def test_nothing_yet():
    state = measure([], 10, now=5.0)
    assert (state.num_done, state.tokens_per_s, state.eta_s, state.cost_usd) == (0, None, None, 0)
    assert "stopped" in render(state) and "0 of 10" in render(state)


def test_an_empty_job_is_complete():
    assert "complete" in render(measure([], 0, now=1.0))


def test_speed_and_time_left_are_those_of_all_workers():
    parts = [
        part(points=[point(50, 5, 500), point(100, 10, 1000)]),
        part("w1", points=[point(100, 30, 3000)]),
    ]
    state = measure(parts, 100, now=110.0)
    assert state.num_done == 40 and state.num_running == 2
    assert state.tokens_per_s == pytest.approx(40.0)
    assert state.mean_tokens_per_s == pytest.approx(20.0)
    assert state.eta_s == pytest.approx(60 / 0.4)
    assert state.cost_usd == pytest.approx(200.0)
    assert state.usd_per_million_tokens == pytest.approx(200 / 4000 * 1e6)
    assert state.idle_s == 10.0
    assert "left      2 min" in render(state)


def test_speed_is_that_of_the_last_minutes():
    slow_then_fast = [point(1000, 10, 100), point(1200, 110, 1100)]
    state = measure([part(points=slow_then_fast)], 500, now=1200.0)
    assert state.rows_per_s == pytest.approx(110 / 1200)
    long_ago = [point(800, 10, 100), *slow_then_fast]
    state = measure([part(points=[point(890, 5, 50), *long_ago[1:]])], 500, now=1200.0)
    assert state.rows_per_s == pytest.approx(105 / 310)


def test_a_journal_known_only_at_its_end_counts_from_there():
    state = measure([part(points=[point(1000, 500, 0), point(1100, 600, 0)], whole=False)], 1000, now=1100.0)
    assert state.num_done == 600 and state.rows_per_s == pytest.approx(1.0)


def test_time_between_two_starts_costs_nothing():
    parts = [part(points=[point(10, 1, 1)], closed=10.0), part(started=1000.0, points=[point(1020, 1, 1)])]
    state = measure(parts, 5, now=1020.0)
    assert state.worker_hours == pytest.approx(30 / 3600)
    assert state.num_workers == state.num_running == 1


def test_a_silent_worker_does_not_run():
    state = measure([part(points=[point(10, 1, 1)])], 5, now=10_000.0)
    assert state.num_running == 0 and state.eta_s is None
    assert "stopped   start the same command again" in render(state)


def test_the_command_reads_a_job(tmp_path, capsys):
    source = FakeSource()
    job = Run(tmp_path / "job", source, plan(source, samples=2), failing=lambda ordinal: ordinal == 3)
    job.start(stop_after=32)
    assert command.main([str(job.path)]) == 0
    assert "results   30 of 64 (46.9%), 2 errors, 2 skipped" in capsys.readouterr().out
    job.failing, job.retry_errors = (lambda ordinal: False), True
    job.start()
    assert command.main([str(job.path), "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["num_done"], numbers["num_errors"], numbers["num_parts"]) == (64, 0, 2)
    assert command.main([str(tmp_path / "nothing")]) == 1


def test_status_reads_no_part(tmp_path):
    source = FakeSource()
    job = Run(tmp_path / "job", source, plan(source))
    job.start()
    for path in (job.path / "parts").iterdir():
        path.unlink()
    assert journal_names(job.path) == ["w0-00000"]
    assert command.status(job.path).complete
