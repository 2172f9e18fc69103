"""The scheduler's policy, one decision at a time."""

from __future__ import annotations

import numpy as np
import pytest
from step_fakes import STUB_STOP, drive, make_scheduler, stub_sequence

from pipeline.engine.scheduler import Scheduler
from pipeline.engine.sequence import Sequence, TokenLogprobs
from pipeline.request import FinishReason


def add(scheduler: Scheduler, *lengths_and_limits: tuple[int, int]) -> None:
    """Rows of different prompts, so that nothing is shared by accident."""
    for row, (length, max_tokens) in enumerate(lengths_and_limits):
        scheduler.add(stub_sequence(row, [row + 1] * length, max_tokens))


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_nothing_to_do() -> None:
    scheduler = make_scheduler()
    assert scheduler.schedule() is None and not scheduler.has_work


def test_a_long_prompt_is_cut_into_chunks_and_yields_at_the_end_alone() -> None:
    scheduler = make_scheduler(budget=10)
    add(scheduler, (25, 3))
    plans = [scheduler.schedule() for _ in range(3)]
    assert [(p.starts.tolist(), p.query_lens.tolist(), p.sampled.tolist()) for p in plans if p] == [
        ([0], [10], [False]),
        ([10], [10], [False]),
        ([20], [5], [True]),
    ]
    assert (scheduler.counters.num_prefill_chunks, scheduler.counters.num_partial_prefill_chunks) == (3, 2)


def test_decodes_come_first_and_prefill_takes_what_is_left() -> None:
    scheduler = make_scheduler(budget=8)
    add(scheduler, (3, 5), (3, 5), (20, 5))
    first = scheduler.schedule()
    assert first is not None and first.query_lens.tolist() == [3, 3, 2]
    scheduler.update(first, tokens(5, 5))
    second = scheduler.schedule()
    assert second is not None
    assert second.query_lens.tolist() == [1, 1, 6] and second.sampled.tolist() == [True, True, False]


def test_a_step_planned_before_the_last_result_carries_its_tokens_over() -> None:
    scheduler = make_scheduler()
    add(scheduler, (3, 5))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    assert (first.carried.tolist(), second.carried.tolist()) == ([False], [True])
    assert second.starts.tolist() == [3]
    scheduler.update(first, tokens(5))
    # The step after that carries too: its token is in the air again.
    third = scheduler.schedule()
    assert third is not None and third.carried.tolist() == [True]


def test_an_end_by_length_is_known_one_step_early_and_wastes_nothing() -> None:
    scheduler = make_scheduler()
    add(scheduler, (3, 2))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None and scheduler.schedule() is None
    assert scheduler.update(first, tokens(5)) == []
    (done,) = scheduler.update(second, tokens(6))
    assert done.finish_reason is FinishReason.LENGTH and done.tokens.tolist() == [1, 1, 1, 5, 6]
    assert scheduler.counters.num_wasted_row_steps == 0


def test_an_end_by_stop_wastes_one_row_step_whose_result_nobody_gets() -> None:
    scheduler = make_scheduler(num_slots=1)
    add(scheduler, (3, 9), (2, 9))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    (done,) = scheduler.update(first, tokens(STUB_STOP))
    assert done.finish_reason is FinishReason.STOP
    # The slot has a new owner before the late token comes.
    third = scheduler.schedule()
    assert third is not None and third.starts.tolist() == [0]
    assert scheduler.update(second, tokens(4)) == []
    assert scheduler.counters.num_wasted_row_steps == 1
    assert scheduler.table.length[third.slots[0]] == 2


def test_admission_leaves_room_for_what_running_rows_may_still_need() -> None:
    """Seven blocks of 4; each row may come to 16 tokens, that is four blocks."""
    scheduler = make_scheduler(num_blocks=8)
    add(scheduler, (4, 12), (4, 12))
    plan = scheduler.schedule()
    assert plan is not None and len(plan.slots) == 1
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    relaxed = make_scheduler(num_blocks=8, reserve=0.0)
    add(relaxed, (4, 12), (4, 12))
    plan = relaxed.schedule()
    assert plan is not None and len(plan.slots) == 2


def test_the_first_in_line_is_not_overtaken_by_a_smaller_one() -> None:
    scheduler = make_scheduler(num_blocks=8)
    add(scheduler, (4, 12), (4, 12), (1, 1))
    plan = scheduler.schedule()
    assert plan is not None and len(plan.slots) == 1 and scheduler.num_waiting == 2


def test_the_youngest_is_preempted_and_keeps_its_tokens() -> None:
    """Five blocks of 2: two rows of two blocks each want a third one at the same time."""
    scheduler = make_scheduler(num_blocks=6, block_size=2, reserve=0.0, sharing=False)
    add(scheduler, (4, 6), (4, 6))
    first = scheduler.schedule()
    assert first is not None
    scheduler.update(first, tokens(5, 6))
    second = scheduler.schedule()
    assert second is not None and second.slots.tolist() == [first.slots[0]]
    assert scheduler.counters.num_preemptions == 1 and scheduler.num_waiting == 1
    done: list[Sequence] = []
    plan = second
    while not done:
        done = scheduler.update(plan, tokens(3))
        plan = scheduler.schedule()  # type: ignore[assignment]
    # Back with five known tokens, computed anew in one chunk; no token is sampled twice.
    assert (plan.starts.tolist(), plan.query_lens.tolist(), plan.sampled.tolist()) == ([0], [5], [True])


def test_a_row_preempted_while_its_token_is_in_the_air_keeps_that_token_too() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=2, reserve=0.0, sharing=False)
    add(scheduler, (4, 6), (4, 6))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    assert scheduler.counters.num_preemptions == 1 and len(second.slots) == 1
    assert scheduler.num_waiting == 0, "it waits for its token before it returns to the queue"
    scheduler.update(first, tokens(5, 6))
    assert scheduler.num_waiting == 1
    finished = scheduler.update(second, tokens(3))
    assert finished == [] and scheduler.counters.num_wasted_row_steps == 0


def test_a_row_preempted_in_the_air_that_ends_with_that_token_is_finished() -> None:
    scheduler = make_scheduler(num_blocks=6, block_size=2, reserve=0.0, sharing=False)
    add(scheduler, (4, 6), (4, 6))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None and scheduler.counters.num_preemptions == 1
    (done,) = scheduler.update(first, tokens(5, STUB_STOP))
    assert done.tokens.tolist() == [2, 2, 2, 2, STUB_STOP]
    assert scheduler.num_waiting == 0


def test_prefixes_are_shared_but_the_last_token_is_always_computed() -> None:
    scheduler = make_scheduler(block_size=4)
    for row in range(2):
        scheduler.add(stub_sequence(row, [1, 2, 3, 4, 5, 6, 7, 8], 3))
    plan = scheduler.schedule()
    assert plan is not None
    # Eight tokens are two blocks; of the second the twin computes its own copy.
    assert (plan.starts.tolist(), plan.query_lens.tolist()) == ([0, 4], [8, 4])
    assert scheduler.counters.num_shared_blocks == 1
    tables = scheduler.blocks.groups[0].table[plan.slots, :2]
    assert tables[0, 0] == tables[1, 0] and tables[0, 1] != tables[1, 1]


def test_a_row_that_the_whole_cache_cannot_hold_is_refused() -> None:
    scheduler = make_scheduler(num_blocks=5, block_size=4)
    scheduler.add(stub_sequence(0, [1] * 10, 6))
    with pytest.raises(ValueError, match=r"engine\.num_blocks=5 holds no row of 17 tokens.*raise it"):
        scheduler.add(stub_sequence(1, [1] * 10, 7))
    assert scheduler.num_waiting == 1


def test_max_model_len_limits_what_is_promised() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.add(stub_sequence(0, [1] * 10, 500, max_model_len=12))
    (done,) = drive(scheduler, [], overlap=True)
    assert len(done.tokens) <= 12


def test_logprobs_of_a_late_result_go_with_its_token() -> None:
    scheduler = make_scheduler()
    for row in range(2):
        scheduler.add(stub_sequence(row, [row + 1] * 3, 2, logprobs=True))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    none = np.empty((2, 0))
    (stopped,) = scheduler.update(
        first, tokens(STUB_STOP, 5), TokenLogprobs(np.array([-1.0, -2.0], np.float32), none, none)
    )
    (other,) = scheduler.update(
        second, tokens(6, 4), TokenLogprobs(np.array([-3.0, -4.0], np.float32), none, none)
    )
    assert stopped.logprobs is not None and other.logprobs is not None
    assert stopped.logprobs.logprobs.tolist() == [-1.0]
    assert other.logprobs.logprobs.tolist() == [-2.0, -4.0]
