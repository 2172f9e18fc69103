from __future__ import annotations

import io

import pytest

from pipeline.config import CostConfig, ReportConfig
from pipeline.report.progress import ProgressDisplay, ProgressStats, duration_text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def stats(rows: int, tokens: int, running: int = 3) -> ProgressStats:
    return ProgressStats(rows, 10 * rows, tokens, running, 7, 0.25)


def display(stream, clock, total=1000, interval_s=10.0, gpu_hour_usd=3.6, rows_before=0):
    config, cost = ReportConfig(interval_s=interval_s), CostConfig(gpu_hour_usd=gpu_hour_usd)
    return ProgressDisplay(total, config, cost, rows_before, stream, clock)


def test_a_log_gets_one_line_an_interval_without_carriage_returns():
    """Ten minutes of forty updates a second: tqdm left 30 MB in such a log."""
    stream, clock = io.StringIO(), Clock()
    with display(stream, clock, total=24_000) as shown:
        for step in range(24_000):
            clock.now += 0.025
            shown.update(stats(step + 1, 100 * step))
    text = stream.getvalue()
    assert "\r" not in text and "\x1b" not in text
    assert len(text) < 100_000
    assert 59 <= text.count("\n") <= 61


def test_a_line_says_where_the_job_stands():
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, clock)
    clock.now += 20
    shown.update(stats(200, 40_000))
    # $3.60 an hour is a tenth of a cent a second: 2 cents for 40,000 tokens.
    assert stream.getvalue() == (
        "200/1,000 rows (20%), 2,000 tokens/s, 3 running, 7 waiting, KV 25%, "
        "$0.50/M tokens, 1 min 20 s left\n"
    )


def test_tokens_per_second_are_those_since_the_last_line():
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, clock)
    for tokens in (1_000, 6_000):
        clock.now += 10
        shown.update(stats(1, tokens))
    assert [line.split(", ")[1] for line in stream.getvalue().splitlines()] == [
        "100 tokens/s",
        "500 tokens/s",
    ]


def test_rows_of_an_earlier_run_count_as_done_but_not_for_the_rate():
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, clock, rows_before=900)
    clock.now += 10
    shown.update(stats(50, 100))
    line = stream.getvalue()
    assert line.startswith("950/1,000 rows (95%)")
    assert line.endswith("10 s left\n")


def test_no_price_is_shown_where_there_is_none():
    stream, clock = io.StringIO(), Clock()
    shown = display(stream, clock, gpu_hour_usd=0.0)
    clock.now += 10
    shown.update(stats(5, 100))
    assert "$" not in stream.getvalue()


def test_closing_shows_the_last_state_once():
    stream, clock = io.StringIO(), Clock()
    with display(stream, clock) as shown:
        clock.now += 1
        shown.update(stats(1000, 100))
        assert stream.getvalue() == ""
    shown.close()
    assert stream.getvalue().count("1,000/1,000 rows (100%)") == 1
    assert "left" not in stream.getvalue()


@pytest.mark.parametrize("total", [0, 5])
def test_a_job_with_nothing_to_do_shows_nothing(total):
    stream = io.StringIO()
    with display(stream, Clock(), total=total, rows_before=total):
        pass
    assert stream.getvalue() == ""


def test_an_input_without_rows_can_be_updated():
    stream, clock = io.StringIO(), Clock()
    with display(stream, clock, total=0) as shown:
        clock.now += 60
        shown.update(stats(0, 0))
    assert stream.getvalue().startswith("0/0 rows, 0 tokens/s")


def test_a_terminal_gets_a_bar():
    stream, clock = Terminal(), Clock()
    with display(stream, clock, rows_before=100) as shown:
        clock.now += 2
        shown.update(stats(400, 1_000))
    text = stream.getvalue()
    assert "\r" in text and "500/1000" in text and "500 tokens/s" in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.52, "0.5 s"), (42, "42 s"), (185, "3 min 05 s"), (59.6, "1 min 00 s"), (7800, "2 h 10 min")],
)
def test_durations(seconds, text):
    assert duration_text(seconds) == text
