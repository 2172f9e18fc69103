"""The table of sequence slots: what goes in comes out, and a slot's old owner never shows."""

from __future__ import annotations

from typing import Any

import numpy as np
from fakes import request

from pipeline.engine.philox import sequence_key
from pipeline.engine.sequence import NO_TOKEN, Sequence, SequenceTable, TokenLogprobs, make_sequence


def sequence(
    ids: list[int], *, row: int = 0, eos: tuple[int, ...] = (), max_model_len: int = 1_000, **params: Any
) -> Sequence:
    return make_sequence(
        request(row, ids, **params),
        0,
        seed=1,
        max_model_len=max_model_len,
        eos_ids=eos,
        matcher=None,
        block_hashes=[],
    )


def values(*logprobs: float, num_topk: int = 2) -> TokenLogprobs:
    column = np.array(logprobs, np.float32)
    ids = np.arange(num_topk) + (-column[:, None] * 10).astype(np.int32)
    return TokenLogprobs(
        column, ids.astype(np.int32), column[:, None] - np.arange(num_topk, dtype=np.float32)
    )


def test_limits_and_stop_ids_are_those_of_request_and_model() -> None:
    made = sequence([1, 2, 3], max_tokens=10, eos=(5, 9), stop_token_ids=(7, 5))
    assert (made.limit, made.stop_ids.tolist(), made.num_prompt_tokens) == (13, [5, 7, 9], 3)
    assert sequence([1, 2, 3], max_tokens=10, max_model_len=8).limit == 8
    assert sequence([1], eos=(5,), stop_token_ids=(7,), ignore_eos=True).stop_ids.tolist() == [7]
    assert made.philox_key.tolist() == sequence_key(1, 0, 0, 0).tolist()


def test_a_sequence_comes_out_with_what_was_appended() -> None:
    table = SequenceTable(2)
    first, second = table.place(sequence([1, 2], row=1)), table.place(sequence([3], row=2))
    assert table.num_free_slots == 0
    for ids in ([10, 20], [11, 21]):
        table.pending[[first, second]] += 1
        table.append(np.array([first, second]), np.array(ids, np.int32), None)
    assert table.release(second).tokens.tolist() == [3, 20, 21]
    assert table.release(first).tokens.tolist() == [1, 2, 10, 11]
    assert table.num_free_slots == 2 and not table.running.any() and (table.pending == 0).all()


def test_a_slot_that_changes_hands_keeps_nothing_and_has_a_new_epoch() -> None:
    table = SequenceTable(1)
    old = sequence([1], temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, min_tokens=2, eos=(4, 5, 6))
    slot = table.place(old)
    epoch = int(table.epoch[slot])
    table.scheduled[slot] = table.pending[slot] = 1
    table.release(slot)
    assert table.place(sequence([7, 8], row=1, eos=(9,))) == slot
    assert table.epoch[slot] > epoch
    assert (table.scheduled[slot], table.pending[slot]) == (0, 0)
    assert table.stop_ids[slot].tolist() == [9, NO_TOKEN, NO_TOKEN]
    assert (table.temperature[slot], table.top_k[slot], table.top_p[slot], table.min_p[slot]) == (0, 0, 1, 0)
    assert (table.length[slot], table.num_prompt[slot], table.min_length[slot]) == (2, 2, 2)


def test_long_rows_widen_the_table_and_keep_their_neighbours() -> None:
    table = SequenceTable(2)
    short = table.place(sequence([1, 2, 3], max_tokens=5))
    long = table.place(sequence(list(range(900)), row=1, max_tokens=50))
    assert table.tokens.shape[1] >= 950
    assert table.release(short).tokens.tolist() == [1, 2, 3]
    assert table.release(long).tokens.tolist() == list(range(900))


def test_the_table_does_not_keep_the_callers_array() -> None:
    ids = np.array([1, 2, 3], np.int32)
    table = SequenceTable(1)
    slot = table.place(sequence(ids.tolist()))
    table.pending[slot] += 1
    table.append(np.array([slot]), np.array([9], np.int32), None)
    made = table.release(slot)
    table.tokens[:] = 0
    assert made.tokens.tolist() == [1, 2, 3, 9]


def test_logprobs_stay_with_their_tokens_over_a_return_to_the_queue() -> None:
    """Preempted after two tokens, placed in another slot, one more token."""
    table = SequenceTable(2, num_topk=2)
    other = table.place(sequence([5], row=1))
    slot = table.place(sequence([1, 2], logprobs=True))
    for value in (-0.5, -1.5):
        table.pending[slot] += 1
        table.append(np.array([slot]), np.array([7], np.int32), values(value))
    table.release(other)
    kept = table.release(slot)
    assert kept.logprobs is not None and kept.logprobs.logprobs.tolist() == [-0.5, -1.5]
    table.place(sequence([6], row=2))
    again = table.place(kept)
    assert again != slot or table.epoch[again] > 0
    table.pending[again] += 1
    table.append(np.array([again]), np.array([8], np.int32), values(-2.5))
    done = table.release(again)
    expected = values(-0.5, -1.5, -2.5)
    assert done.logprobs is not None
    assert done.logprobs.logprobs.tolist() == expected.logprobs.tolist()
    assert done.logprobs.topk_ids.tolist() == expected.topk_ids.tolist()
    assert done.logprobs.topk_logprobs.tolist() == expected.topk_logprobs.tolist()
    assert done.tokens.tolist() == [1, 2, 7, 7, 8]


def test_memory_of_logprobs_follows_the_completions_not_the_limits() -> None:
    """150,000 ids or 100,000 tokens allowed: what is kept is slots x completion x (4 + 8 K) bytes."""
    table = SequenceTable(4, num_topk=20)
    slot = table.place(sequence([1], max_tokens=100_000, max_model_len=200_000, top_logprobs=20))
    for _ in range(50):
        table.pending[slot] += 1
        table.append(np.array([slot]), np.array([2], np.int32), values(-1.0, num_topk=20))
    kept = table.logprobs.nbytes + table.topk_ids.nbytes + table.topk_logprobs.nbytes
    assert kept <= 4 * (2 * 50) * (4 + 8 * 20)


def test_logprobs_unasked_are_not_given() -> None:
    table = SequenceTable(1, num_topk=2)
    slot = table.place(sequence([1, 2]))
    table.pending[slot] += 1
    table.append(np.array([slot]), np.array([7], np.int32), values(-0.5))
    assert table.release(slot).logprobs is None
