"""Status: sums, speeds, hours, money, who is alive and the time left, from records and journals' ends."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from fake_jobs import FakeSource, Run, Worker, complete, plan

from pipeline import status as command
from pipeline.cluster import survey
from pipeline.cluster.processes import Process
from pipeline.output import journal
from pipeline.output.layout import journal_names
from pipeline.output.ledger import Ledger
from pipeline.output.progress import JobDirectory
from pipeline.report.status import Count, PartProgress, State, WorkerProgress, measure
from pipeline.report.status_line import StatusLine
from pipeline.report.status_text import progress_line, render

NOTHING = Count()


def part(worker="w0", started=0.0, points=(), whole=True, void=NOTHING) -> PartProgress:
    return PartProgress(worker, started, tuple(points), whole, void)


def life(worker="w0", incarnation=None, started=0.0, loaded=0.0, beat=0.0, busy=0.0, ended=False, gone=False):
    return WorkerProgress(incarnation or worker, worker, started, loaded, beat, busy, 3600.0, ended, gone)


def point(time: float, results: int, tokens: int) -> tuple[float, Count]:
    return time, Count(results=results, completion_tokens=tokens)


def measured(parts, num_results: int, now: float, lives=None):
    """lives: one for each part unless given, heard of just now."""
    if lives is None:
        lives = [life(p.incarnation, started=p.started, beat=p.last_time) for p in parts]
    return measure(parts, lives, num_results, now, lease_s=60.0)


def test_nothing_yet():
    state = measured([], 10, now=5.0)
    assert (state.num_done, state.tokens_per_s, state.eta_s, state.cost_usd) == (0, None, None, 0)
    assert "stopped" in render(state) and "0 of 10" in render(state)
    assert progress_line(state) == "0/10 rows (0%), 0 tokens/s, 0 workers"


def test_an_empty_job_is_complete():
    assert "complete" in render(measured([], 0, now=1.0))


def test_speed_and_time_left_are_those_of_all_workers():
    parts = [
        part(points=[point(50, 5, 500), point(100, 10, 1000)]),
        part("w1", points=[point(100, 30, 3000)]),
    ]
    state = measured(parts, 100, now=110.0)
    assert state.num_done == 40 and state.num_workers(State.running) == 2
    assert state.tokens_per_s == pytest.approx(40.0)
    assert state.mean_tokens_per_s == pytest.approx(20.0)
    assert state.eta_s == pytest.approx(60 / 0.4)
    assert state.cost_usd == pytest.approx(200.0)
    assert state.usd_per_million_tokens == pytest.approx(200 / 4000 * 1e6)
    assert state.idle_s == 10.0
    assert "left      2 min" in render(state)
    assert progress_line(state) == "40/100 rows (40%), 40 tokens/s, 2 workers, $200.00, 2 min left"


def test_speed_is_that_of_the_last_minutes():
    slow_then_fast = [point(1000, 10, 100), point(1200, 110, 1100)]
    state = measured([part(points=slow_then_fast)], 500, now=1200.0)
    assert state.rows_per_s == pytest.approx(110 / 1200)
    state = measured([part(points=[point(890, 5, 50), slow_then_fast[-1]])], 500, now=1200.0)
    assert state.rows_per_s == pytest.approx(105 / 310)


def test_a_journal_known_only_at_its_end_counts_from_there():
    state = measured([part(points=[point(1000, 500, 0), point(1100, 600, 0)], whole=False)], 1000, now=1100.0)
    assert state.num_done == 600 and state.rows_per_s == pytest.approx(1.0)


def test_time_between_two_starts_costs_nothing():
    parts = [part("w0.a", points=[point(10, 1, 1)]), part("w0.b", started=1000.0, points=[point(1020, 1, 1)])]
    lives = [
        life("w0", "w0.a", beat=10.0),
        life("w0", "w0.b", started=1000.0, loaded=1005.0, beat=1020.0),
    ]
    state = measured(parts, 5, now=1020.0, lives=lives)
    assert state.hours.total == pytest.approx(30 / 3600)
    # one worker, in its second life
    assert [(worker.name, worker.state) for worker in state.workers] == [("w0", State.running)]
    assert state.num_restarts == 1


def test_hours_are_split_by_what_they_were_spent_on():
    void = Count(results=5, completion_tokens=250)
    parts = [part(points=[point(1000, 20, 1000)], void=void), part("w1", points=[point(900, 10, 500)])]
    lives = [
        # 100 s loading, 800 busy, a quarter of its tokens in vain
        life(loaded=100.0, beat=1000.0, busy=800.0),
        # its record is older than its last commit
        life("w1", loaded=50.0, beat=850.0, busy=850.0),
        life("idle", loaded=None, beat=7.0, ended=True),
        life("loading", loaded=None, beat=30.0),
    ]
    hours = measured(parts, 100, now=1000.0, lives=lives).hours
    spent = {name: value * 3600 for name, value in dataclasses.asdict(hours).items()}
    assert spent == pytest.approx({"loading": 180.0, "useful": 600.0 + 850.0, "idle": 107.0, "redone": 200.0})
    state = measured(parts, 100, now=1000.0, lives=lives)
    assert (state.num_done, state.completion_tokens, state.redone_tokens) == (25, 1250, 250)
    assert state.cost_usd == pytest.approx(1000 + 900 + 7 + 30)
    assert "GPU time  3 min loading, 24 min useful, 2 min idle, 3 min redone" in render(state)
    assert "250 more made in vain" in render(state)


def test_workers_are_told_apart_by_their_last_sign_of_life():
    lives = [
        life("here", beat=990.0),
        life("silent", beat=900.0),
        life("killed", beat=995.0, gone=True),
        life("done", beat=100.0, ended=True),
        # an earlier life that died is no news once the next one runs
        life("back", "back.1", beat=500.0),
        life("back", "back.2", started=600.0, beat=999.0),
    ]
    state = measured([], 10, now=1000.0, lives=lives)
    assert {worker.name: (worker.state.value, worker.beat_age_s) for worker in state.workers} == {
        "here": ("running", 10.0),
        "back": ("running", 1.0),
        "silent": ("stale", 100.0),
        "killed": ("stale", 5.0),
        "done": ("ended", 900.0),
    }
    text = render(state)
    assert "workers   2 running, 2 stale, 1 ended, 1 restarts, 0 parts" in text
    assert "  running back (1 s ago), here (10 s ago)" in text
    assert "  stale   killed (5 s ago), silent (2 min ago)" in text


def test_of_a_thousand_workers_a_few_are_named():
    state = measured([], 10, now=10.0, lives=[life(f"w{n:03d}", beat=n / 100) for n in range(1000)])
    assert "w999 (0 s ago)" in render(state) and "and 994 more" in render(state)
    assert len(render(state)) < 1200


def test_a_silent_worker_does_not_run():
    state = measured([part(points=[point(10, 1, 1)])], 5, now=10_000.0)
    assert state.num_workers(State.running) == 0 and state.eta_s is None
    assert "stopped   start the same command again" in render(state)


# ---------------------------------------------------------------- from files


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
    assert numbers["complete"] and numbers["eta_s"] == 0 and numbers["num_stale"] == 2
    assert command.main([str(tmp_path / "nothing")]) == 1


def test_status_reads_no_part(tmp_path):
    source = FakeSource()
    job = Run(tmp_path / "job", source, plan(source))
    job.start()
    for path in (job.path / "parts").iterdir():
        path.unlink()
    assert journal_names(job.path) == ["w0-00000"]
    assert command.status(job.path).complete


def journals_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with the names of journals that are read as a whole."""
    names: list[str] = []
    read = journal.read

    def noted(path: Path, store=None):
        names.append(path.stem)
        return read(path, store)

    monkeypatch.setattr(survey.journal, "read", noted)
    return names


def two_workers(tmp_path) -> tuple[JobDirectory, Worker, Worker]:
    source = FakeSource()
    directory = JobDirectory.open(tmp_path / "job", plan(source), source.scan())
    first, second = (Worker.on(directory, source, name, poll_s=0.0) for name in ("w0.a", "w1.b"))
    return directory, first, second


def make(worker: Worker, rows, count: int) -> None:
    for _ in range(count):
        row, sample = next(rows)
        worker.writer.append(complete(row, sample))
    worker.writer.commit()


def test_what_was_made_in_vain_is_told_from_what_counts(tmp_path, monkeypatch):
    directory, first, second = two_workers(tmp_path)
    rows = first.rows()
    make(first, rows, 3)
    # the second finds the first's process gone, and takes its units over and all the rest
    make(second, second.rows(), 29)
    names = journals_read(monkeypatch)
    state = command.status(directory.path)
    assert state.complete and state.redone_tokens == 0
    assert names == [], "nobody wrote after a loss"
    # what a zombie writes: past the check before its commit, as if that had come too late
    before = Ledger.read(directory.path).num_commits
    monkeypatch.setattr(first.claims, "lost", lambda leases: set())
    make(first, rows, 1)
    again = command.status(directory.path)
    ledger = Ledger.read(directory.path)
    assert ledger.num_commits == before + 1
    assert names == ["w0.a-00000"]
    assert again.num_done == ledger.num_results == 32 == state.num_done
    assert again.redone_tokens > 0 and again.completion_tokens == state.completion_tokens
    assert again.num_errors == 0 and again.num_skipped == state.num_skipped


def test_what_status_counts_is_what_the_ledger_counts(tmp_path):
    source = FakeSource()
    job = Run(tmp_path / "job", source, plan(source, samples=2), failing=lambda ordinal: ordinal % 5 == 0)
    for stop_after in (7, 5, 11):
        job.start(stop_after=stop_after)
        ledger = Ledger.read(job.path)
        rows, errors = ledger.sums(ledger.num_units)
        state = command.status(job.path)
        assert (state.num_done, state.num_errors) == (int(rows.sum()), int(errors.sum()))


def test_a_worker_that_beats_runs_until_its_lease_is_over(tmp_path):
    source = FakeSource()
    directory = JobDirectory.open(tmp_path / "job", plan(source), source.scan())
    worker = Worker.on(directory, source, "w0.a", process=Process.current())
    worker.member.note_loaded()
    worker.member.note_work(1, 10, 0.5)
    worker.member.beat()
    now = time.time()
    assert [w.state for w in command.status(directory.path, now + 59).workers] == [State.running]
    assert [w.state for w in command.status(directory.path, now + 61).workers] == [State.stale]
    assert [w.state for w in command.status(directory.path, now + 61, lease_s=100).workers] == [State.running]
    worker.member.leave("done")
    assert [w.state for w in command.status(directory.path, now + 61).workers] == [State.ended]


def test_rates_of_long_journals_are_those_of_the_last_minutes(tmp_path):
    source = FakeSource()
    job = Run(tmp_path / "job", source, plan(source))
    job.start()
    path = job.path / "journal" / "w0-00000.jsonl"
    header = next(journal.read(path))
    header = dataclasses.replace(header, started=0.0)
    totals = [journal.Totals(rows=n + 1, completion_tokens=3 * n) for n in range(2000)]
    commits = [
        journal.Commit(n, header.offset + n + 1, 1, "ab", (), total, 10.0 * n)
        for n, total in enumerate(totals)
    ]
    path.write_bytes(b"".join(journal.encode(entry) for entry in (header, *commits)))
    state = command.status(job.path, now=19_990.0)
    assert state.rows_per_s == pytest.approx(0.1) and state.tokens_per_s == pytest.approx(0.3)


def test_watching_ends_with_the_job(tmp_path, capsys):
    source = FakeSource()
    job = Run(tmp_path / "job", source, plan(source))
    job.start()
    assert command.main([str(job.path), "--watch", "0.01"]) == 0
    assert capsys.readouterr().out.count("complete") == 1


class Terminal:
    def __init__(self, is_terminal: bool) -> None:
        self.text = ""
        self.isatty = lambda: is_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def test_a_line_is_redrawn_on_a_terminal_and_repeated_in_a_log():
    for is_terminal in (True, False):
        stream = Terminal(is_terminal)
        line = StatusLine(stream)
        for text in ("one", "one", "two"):
            line.show(text)
        line.say("worker w0 died")
        line.end()
        if is_terminal:
            assert stream.text.count("\n") == 2 and stream.text.endswith(
                "\x1b[Kworker w0 died\n\r\x1b[Ktwo\n"
            )
        else:
            assert stream.text == "one\ntwo\nworker w0 died\n"
