"""Two steps in the air, in order; errors come out where the result is asked for; no thread stays."""

from __future__ import annotations

import threading
import time

import pytest

from pipeline.engine.slots import BatchSlots
from pipeline.timeline import DeviceSpan

OVERLAPS = pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])


def test_with_overlap_a_launch_returns_before_the_step_is_over() -> None:
    go, started = threading.Event(), threading.Event()

    def step(number: int) -> int:
        started.set()
        assert go.wait(10)
        return number * 10

    with BatchSlots(step, overlap=True) as slots:
        first = slots.launch(1)
        assert started.wait(10) and not first.done.is_set()
        second = slots.launch(2)
        assert second is not first and not second.done.is_set()
        go.set()
        assert (first.result(), second.result()) == (10, 20)


def test_without_overlap_a_launch_computes() -> None:
    threads = []

    def step(number: int) -> int:
        threads.append(threading.current_thread())
        return number

    before = threading.active_count()
    with BatchSlots(step, overlap=False) as slots:
        assert slots.launch(1).done.is_set()
        assert threading.active_count() == before
    assert threads == [threading.current_thread()]


@OVERLAPS
def test_steps_run_one_after_the_other_in_the_order_of_launch(overlap: bool) -> None:
    log: list[tuple[str, int]] = []

    def step(number: int) -> int:
        log.append(("begin", number))
        time.sleep(0.001)
        log.append(("end", number))
        return number

    with BatchSlots(step, overlap=overlap) as slots:
        before = slots.launch(0)
        for number in range(1, 20):
            launched = slots.launch(number)
            assert before.result() == number - 1
            before = launched
        assert before.result() == 19
    assert log == [entry for n in range(20) for entry in (("begin", n), ("end", n))]


@OVERLAPS
def test_an_error_is_raised_where_its_result_is_asked_for_and_the_next_step_runs(overlap: bool) -> None:
    def step(number: int) -> int:
        if number == 1:
            raise MemoryError("step 1")
        return number

    with BatchSlots(step, overlap=overlap) as slots:
        first, second = slots.launch(1), slots.launch(2)
        with pytest.raises(MemoryError, match="step 1"):
            first.result()
        assert second.result() == 2
        assert slots.launch(3).result() == 3


@OVERLAPS
def test_leaving_ends_the_thread_and_lets_steps_in_the_air_end(overlap: bool) -> None:
    done = []

    def step(number: int) -> int:
        time.sleep(0.01)
        done.append(number)
        return number

    before = threading.active_count()
    with pytest.raises(KeyError), BatchSlots(step, overlap=overlap) as slots:
        slots.launch(1)
        slots.launch(2)
        raise KeyError
    assert done == [1, 2]
    assert threading.active_count() == before
    slots.close()


def test_a_slot_in_the_air_is_not_filled_again() -> None:
    go = threading.Event()

    def step(number: int) -> bool:
        return go.wait(10)

    with BatchSlots(step, overlap=True) as slots:
        slots.launch(1)
        slots.launch(2)
        with pytest.raises(AssertionError, match="still running"):
            slots.launch(3)
        go.set()


@OVERLAPS
def test_busy_seconds_are_those_of_the_steps(overlap: bool) -> None:
    def step(number: int) -> int:
        time.sleep(0.02)
        return number

    began = time.perf_counter()
    with BatchSlots(step, overlap=overlap) as slots:
        for number in range(1, 4):
            slots.launch(number).result()
            time.sleep(0.02)
    assert 0.06 <= slots.busy_seconds <= time.perf_counter() - began - 0.06


@OVERLAPS
def test_spans_are_those_of_the_steps_launched_while_they_were_asked_for(overlap: bool) -> None:
    def step(number: int) -> int:
        time.sleep(0.001)
        return number

    taken: list[DeviceSpan] = []
    began = time.perf_counter()
    with BatchSlots(step, overlap=overlap) as slots:
        before = slots.launch(0)
        for number in range(1, 8):
            slots.record_spans(2 <= number < 6)
            launched = slots.launch(number)
            before.result()
            before = launched
            if number == 4:
                taken += slots.take_spans()
                # A span is there as soon as its result is.
                assert {span.step for span in taken} >= {2, 3}
        before.result()
        taken += slots.take_spans()
        assert slots.take_spans() == []
    assert [(s.step, s.slot, s.row) for s in taken] == [(n, n % 2, "compute") for n in range(2, 6)]
    assert all(span.end - span.begin >= 0.001 for span in taken)
    assert all(a.end <= b.begin for a, b in zip(taken, taken[1:], strict=False))
    assert began < taken[0].begin and taken[-1].end < time.perf_counter()


@OVERLAPS
def test_a_step_that_failed_has_its_span_too(overlap: bool) -> None:
    def step(number: int) -> int:
        raise MemoryError(number)

    with BatchSlots(step, overlap=overlap) as slots:
        slots.record_spans(True)
        with pytest.raises(MemoryError):
            slots.launch(1).result()
        assert len(slots.take_spans()) == 1
