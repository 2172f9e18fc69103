from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.config import CostConfig
from pipeline.report.summary import (
    ResolvedValue,
    RunSummary,
    Showcase,
    StepTimes,
    closing_summary,
    shortened,
    start_block,
)


def summary(**changes) -> RunSummary:
    values = {
        "output_dir": "outputs/demo",
        "rows_by_reason": {"stop": 290, "length": 8, "error": 2, "skipped": 0},
        "rows_before": 0,
        "rows_left": 0,
        "prompt_tokens": 4_000,
        "completion_tokens": 9_000,
        "seconds": 18.0,
    }
    return RunSummary(**(values | changes))


def test_the_start_names_each_sampling_value_and_where_it_came_from():
    text = start_block(
        {"model": "m", "input": "300 rows"},
        [ResolvedValue("temperature", 0.7, "sampling.temperature"), ResolvedValue("top_p", 1.0, "default")],
        "<|user|>Hi\n\nthere",
    )
    assert text.splitlines() == [
        "model  m",
        "input  300 rows",
        "sampling",
        "  temperature  0.7  (sampling.temperature)",
        "  top_p        1.0  (default)",
        "first prompt",
        "  | <|user|>Hi",
        "  | ",
        "  | there",
    ]


def test_a_job_with_no_row_left_shows_no_prompt():
    assert "prompt" not in start_block({"model": "m"}, [], None)


def test_the_end_says_what_was_done_and_how_to_go_on():
    text = closing_summary(summary(), CostConfig(gpu_hour_usd=3.6))
    for words in (
        "300 now (290 stop, 8 length, 2 error), none to do",
        "4,000 in, 9,000 out",
        "500 output tokens/s",
        "$0.018, $2.00 per million output tokens ($3.60 a GPU-hour)",
        'pipeline.open_parts("outputs/demo")',
        "tokenmill verify outputs/demo",
        "tokenmill finalize outputs/demo",
        'datasets.load_from_disk("outputs/demo/dataset")',
    ):
        assert words in text
    assert "skipped" not in text


def test_a_job_not_done_is_to_be_started_again_not_finalised():
    text = closing_summary(summary(rows_left=50, rows_before=20), CostConfig())
    assert "20 before, 50 to do" in text and "same command" in text
    assert "finalize" not in text


def test_a_run_that_had_nothing_to_do_divides_by_nothing():
    text = closing_summary(
        summary(rows_by_reason={}, completion_tokens=0, seconds=0.0, rows_before=300), CostConfig()
    )
    assert "0 now, 300 before, none to do" in text
    assert "$" not in text


STEPS = StepTimes(
    True, 500, 2.79, {"intake": 0.1, "schedule": 0.001, "launch": 0.2, "wait": 2.4, "consumer": 0.099}
)


def test_the_end_tells_what_the_steps_took():
    run = summary(start_up="9.3 s (imports 6.0, model 3.3)", steps=STEPS, timeline="a.png")
    lines = dict(line.split(maxsplit=1) for line in closing_summary(run, CostConfig()).splitlines()[:9])
    assert lines["start-up"] == "9.3 s (imports 6.0, model 3.3)"
    assert lines["steps"] == "500, GPU busy 99.6%, 5.60 ms each"
    # What is too little to be shown is in the sum all the same; waiting is no work.
    assert lines["host"] == "0.60 ms a step (intake 0.20, launch 0.40); wait 4.80, consumer 0.20"
    assert lines["timeline"] == "a.png"


def test_where_there_is_no_gpu_none_is_spoken_of():
    text = closing_summary(summary(steps=replace(STEPS, on_gpu=False)), CostConfig())
    assert "500, 99.6% of generating, 5.60 ms each" in text and "busy" not in text


@pytest.mark.parametrize("steps", [None, replace(STEPS, num_steps=0)])
def test_without_steps_nothing_is_said_of_them(steps):
    labels = [line.split()[0] for line in closing_summary(summary(steps=steps), CostConfig()).splitlines()]
    assert not {"steps", "host", "start-up", "timeline"} & set(labels)


class TestShowcase:
    def test_counts_exact_answers_where_one_is_known(self):
        shown = Showcase(num_shown=0)
        shown.add("1 + 1 = ?", " 1 + 1 = 2\n", "1 + 1 = 2")
        shown.add("2 + 2 = ?", "2 + 2 = 5", "2 + 2 = 4")
        shown.add("7?", "7", 7)
        shown.add("a story", "Once", None)
        shown.add("failed", None, "x")
        assert shown.text() == "2 of 4 checked answers are right (50.0%)"

    def test_shows_the_first_few_and_what_a_wrong_one_should_have_been(self):
        shown = Showcase(num_shown=2)
        for prompt, completion, expected in (("p1", "c1", None), ("p2", "c2", "e2"), ("p3", "c3", None)):
            shown.add(prompt, completion, expected)
        assert shown.text().splitlines()[:4] == ["> p1", "  c1", "", "> p2"]
        assert "  c2   (expected: e2)" in shown.text() and "p3" not in shown.text()

    def test_nothing_added_is_nothing_said(self):
        assert Showcase(3).text() == ""


@pytest.mark.parametrize("length", [0, 10, 11, 1000])
def test_long_text_keeps_its_ends(length):
    text = "a" * (length // 2) + "b" * (length - length // 2)
    short = shortened(text, limit=10)
    assert short == text if length <= 10 else short.startswith("aaaaa") and short.endswith("bbbbb")
    assert len(short) < 60
