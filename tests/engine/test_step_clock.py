"""Where the host's time goes, and the window that shows it beside the device's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from fakes import SHIPPED, request, shipped_tokenizer

from pipeline.config import EngineConfig, EngineMode
from pipeline.engine import Engine, Request
from pipeline.engine.model_runner import ModelRunner
from pipeline.engine.step_clock import PHASES, StepClock
from pipeline.timeline import HostSpan, Timeline

MODES = pytest.mark.parametrize("mode", EngineMode)
_STEP_S = 0.02


def shipped_engine(mode: EngineMode, **config: Any) -> Engine:
    return Engine.from_pretrained(str(SHIPPED), EngineConfig(mode=mode, **config))


def questions(num_rows: int = 4, max_tokens: int = 12) -> list[Request]:
    """Rows that end together, after as many steps as they may have tokens."""
    prompts = [shipped_tokenizer()(f"Compute {i} + {i}.")["input_ids"] for i in range(num_rows)]
    return [request(i, ids, max_tokens=max_tokens, ignore_eos=True) for i, ids in enumerate(prompts)]


def recorded(mode: EngineMode, first: int = 3, num_steps: int = 4, **rows: int) -> tuple[Engine, Timeline]:
    engine = shipped_engine(mode, timeline=True, timeline_after=first, timeline_steps=num_steps)
    list(engine.generate(questions(**rows)))
    assert engine.timeline is not None
    return engine, engine.timeline


def begin_of(timeline: Timeline, phase: str, step: int) -> float:
    return min(span.begin for span in timeline.host if (span.phase, span.step) == (phase, step))


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take far longer than all that the host does in between."""
    real = ModelRunner.run

    def run(self: ModelRunner, inputs: Any) -> Any:
        time.sleep(_STEP_S)
        return real(self, inputs)

    monkeypatch.setattr(ModelRunner, "run", run)


class TestPhases:
    @MODES
    def test_they_add_up_to_the_time_of_the_loop(self, mode: EngineMode) -> None:
        engine = shipped_engine(mode)
        began = time.perf_counter()
        assert len(list(engine.generate(questions()))) == 4
        seconds = time.perf_counter() - began
        stats = engine.stats
        assert tuple(stats.phase_seconds) == PHASES
        assert all(stats.phase_seconds[phase] > 0 for phase in PHASES if phase != "launch")
        # What is outside: slots and generator are made, the thread of the slots is ended.
        assert seconds - 0.05 < stats.generating_seconds <= seconds
        assert stats.busy_seconds < stats.generating_seconds

    @MODES
    def test_steps_are_waited_for_and_nothing_else_takes_their_time(
        self, mode: EngineMode, slow_steps: None
    ) -> None:
        engine = shipped_engine(mode)
        list(engine.generate(questions()))
        stats = engine.stats
        work = stats.generating_seconds - stats.phase_seconds["wait"]
        assert stats.phase_seconds["wait"] > 12 * _STEP_S * 0.8
        assert work < 12 * _STEP_S / 2
        assert (stats.phase_seconds["launch"] > 0) is (mode is EngineMode.async_)

    @MODES
    def test_the_consumer_has_its_own(self, mode: EngineMode) -> None:
        asked = 0

        def should_stop() -> bool:
            nonlocal asked
            asked += 1
            time.sleep(0.002)
            return False

        refused = request(99, [], max_tokens=1)
        engine = shipped_engine(mode)
        for _ in engine.generate([refused, *questions()], should_stop):
            time.sleep(0.02)
        spent = engine.stats.phase_seconds
        assert spent["consumer"] >= 5 * 0.02 + asked * 0.002 and asked > 10
        assert max(spent["intake"], spent["complete"]) < 0.05

    @MODES
    def test_requests_that_take_long_are_intake(self, mode: EngineMode) -> None:
        def slowly(rows: Iterable[Request]) -> Iterator[Request]:
            for row in rows:
                time.sleep(0.02)
                yield row

        engine = shipped_engine(mode)
        list(engine.generate(slowly(questions())))
        assert engine.stats.phase_seconds["intake"] >= 4 * 0.02

    @MODES
    def test_nobody_is_at_work_between_two_calls(self, mode: EngineMode) -> None:
        engine = shipped_engine(mode)
        completions = engine.generate(questions())
        next(completions)
        completions.close()  # type: ignore[attr-defined]
        before = engine.stats
        time.sleep(0.02)
        assert engine.stats.phase_seconds == before.phase_seconds
        list(engine.generate(questions()))
        assert engine.stats.generating_seconds > before.generating_seconds > 0

    def test_a_phase_costs_next_to_nothing(self) -> None:
        clock, num_phases = StepClock(), 2_000
        with clock:
            began = time.perf_counter()
            for _ in range(num_phases // 2):
                clock.enter("schedule")
                clock.enter("wait", 3)
            # The least of what is measured on a busy machine would be below 1 µs.
            assert (time.perf_counter() - began) / num_phases < 20e-6


class TestTimeline:
    @MODES
    def test_it_holds_the_steps_that_were_asked_for(self, mode: EngineMode) -> None:
        _, timeline = recorded(mode, first=3, num_steps=4)
        assert (timeline.mode, timeline.on_gpu) == (mode.value, False)
        steps = timeline.compute
        assert [(s.step, s.slot) for s in steps] == [(3, 1), (4, 0), (5, 1), (6, 0)]
        assert list(timeline.device) == steps
        assert all(before.end <= after.begin for before, after in pairwise(steps))
        for step in range(3, 7):
            phases = {span.phase for span in timeline.host if span.step == step}
            assert {"intake", "schedule", "prepare", "wait", "update", "consumer"} <= phases
        assert timeline.busy_share is not None and 0 < timeline.busy_share <= 1

    @MODES
    def test_the_host_is_always_in_one_phase(self, mode: EngineMode) -> None:
        _, timeline = recorded(mode)
        assert all(before.end == after.begin for before, after in pairwise(timeline.host))
        begin, end = timeline.host[0].begin, timeline.host[-1].end
        assert begin < timeline.compute[0].begin and timeline.compute[-1].end < end

    def test_in_async_a_step_is_prepared_while_the_one_before_computes(self, slow_steps: None) -> None:
        _, timeline = recorded(EngineMode.async_)
        for step in timeline.compute[1:]:
            before = timeline.compute[step.step - 1 - timeline.compute[0].step]
            for phase in ("schedule", "prepare", "launch"):
                assert begin_of(timeline, phase, step.step) < before.end - _STEP_S / 2

    def test_in_sync_it_is_not(self, slow_steps: None) -> None:
        _, timeline = recorded(EngineMode.sync)
        for step in timeline.compute[1:]:
            before = timeline.compute[step.step - 1 - timeline.compute[0].step]
            assert begin_of(timeline, "schedule", step.step) > before.end
            assert begin_of(timeline, "prepare", step.step) > before.end

    @MODES
    def test_a_step_lies_between_its_launch_and_its_result(self, mode: EngineMode, slow_steps: None) -> None:
        _, timeline = recorded(mode)
        for step in timeline.compute:
            # In sync, launching is computing, and the clock calls both waiting.
            launched = begin_of(timeline, "launch" if mode is EngineMode.async_ else "wait", step.step)
            taken: list[HostSpan] = [s for s in timeline.host if (s.phase, s.step) == ("update", step.step)]
            assert launched < step.begin and step.end < taken[0].begin

    @MODES
    def test_a_window_that_the_end_cuts_short(self, mode: EngineMode) -> None:
        _, timeline = recorded(mode, first=9, num_steps=40)
        assert [span.step for span in timeline.compute] == [9, 10, 11]

    @MODES
    def test_none_where_none_was_asked_for_or_reached(self, mode: EngineMode) -> None:
        engine = shipped_engine(mode)
        list(engine.generate(questions()))
        assert engine.timeline is None
        engine = shipped_engine(mode, timeline=True, timeline_after=500)
        assert engine.timeline is None
        list(engine.generate(questions()))
        assert engine.timeline is None

    @MODES
    def test_every_call_has_its_own(self, mode: EngineMode) -> None:
        engine, first = recorded(mode)
        list(engine.generate(questions()))
        again = engine.timeline
        assert again is not None and again is not first
        assert [span.step for span in again.compute] == [3, 4, 5, 6]
        assert again.host[0].begin > first.host[-1].end


@pytest.mark.parametrize(("key", "value"), [("timeline_steps", 0), ("timeline_after", -1)])
def test_impossible_windows_are_refused(key: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"engine\.{key}={value}"):
        EngineConfig(**{key: value})
