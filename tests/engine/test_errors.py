"""What goes wrong reaches the caller or becomes a row, and the engine lives on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fakes import VOCABULARY, by_key, loaded_family, make_engine, mixed_prompts, request

from pipeline.config import EngineMode
from pipeline.engine import Completion, Engine, FinishReason, Request, RowKey
from pipeline.request import Refusal, RowError

MODES = pytest.mark.parametrize("mode", EngineMode)


def rows(count: int = 12, **params: Any) -> list[Request]:
    return [request(i, p, **{"max_tokens": 9, **params}) for i, p in enumerate(mixed_prompts(count))]


def tokens(completions: Iterator[Completion]) -> dict[tuple[RowKey, int], list[int]]:
    return {key: c.token_ids.tolist() for key, c in by_key(completions).items()}


def fail_at(engine: Engine, step: int, error: BaseException) -> Callable[[], None]:
    """Let the runner raise at its step-th call from now on; the returned function mends it."""
    healthy, calls = engine._runner.run, 0

    def run(inputs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step:
            raise error
        return healthy(inputs)

    engine._runner.run = run  # type: ignore[method-assign]

    def mend() -> None:
        engine._runner.run = healthy  # type: ignore[method-assign]

    return mend


@MODES
@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_an_error_in_a_step_reaches_the_caller(mode: EngineMode, sharing: bool, step: int) -> None:
    # Long prompts first, so that the broken step computes whole blocks of them.
    asked = rows()[::-1]
    expected = tokens(make_engine(loaded_family("llama"), mode=mode).generate(asked))
    engine = make_engine(
        loaded_family("llama"), mode=mode, max_num_seqs=4, max_num_batched_tokens=64, prefix_sharing=sharing
    )
    for _ in range(2):
        mend = fail_at(engine, step, MemoryError("no memory for the step"))
        before = threading.active_count()
        got = []
        with pytest.raises(MemoryError, match="no memory for the step"):
            for completion in engine.generate(asked):
                got.append(completion)
        assert threading.active_count() <= before
        stats = engine.stats
        assert (stats.num_running, stats.num_waiting, stats.kv_use) == (0, 0, 0.0)
        # Rows that ended before are whole.
        assert all(c.token_ids.tolist() == expected[(c.request.key, c.sample)] for c in got)
        mend()
        # Nothing that the broken step should have computed may be taken for computed.
        assert tokens(engine.generate(asked)) == expected


@MODES
def test_rows_done_before_an_error_are_delivered(mode: EngineMode) -> None:
    engine = make_engine(loaded_family("llama"), mode=mode, max_num_seqs=4)
    fail_at(engine, 12, RuntimeError("late"))
    got = []
    with pytest.raises(RuntimeError, match="late"):
        for completion in engine.generate(rows(ignore_eos=True)):
            got.append(completion)
    assert len(got) == 4


@MODES
def test_an_error_in_the_requests_reaches_the_caller(mode: EngineMode) -> None:
    def broken() -> Iterator[Request]:
        yield from rows(6)
        raise OSError("the disk went away")

    engine = make_engine(loaded_family("llama"), mode=mode, max_num_seqs=2)
    with pytest.raises(OSError, match="the disk went away"):
        list(engine.generate(broken()))
    expected = tokens(make_engine(loaded_family("llama")).generate(rows()))
    assert tokens(engine.generate(rows())) == expected


@MODES
def test_an_error_while_the_callers_iterator_is_closed_is_not_lost_in_a_thread(mode: EngineMode) -> None:
    """Closing waits for the step in the air; no thread stays behind."""
    engine = make_engine(loaded_family("llama"), mode=mode, max_num_seqs=4)
    before = threading.active_count()
    completions = engine.generate(rows())
    next(completions)
    completions.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before


@MODES
def test_a_nested_generate_is_refused_and_the_outer_one_goes_on(mode: EngineMode) -> None:
    engine = make_engine(loaded_family("llama"), mode=mode, max_num_seqs=4)
    expected = tokens(make_engine(loaded_family("llama")).generate(rows()))
    outer, got = engine.generate(rows()), {}
    for completion in outer:
        got[(completion.request.key, completion.sample)] = completion.token_ids.tolist()
        with pytest.raises(RuntimeError, match="already generating"):
            next(engine.generate(rows(2)))
    assert got == expected


@MODES
def test_refusals_pass_straight_through(mode: EngineMode) -> None:
    error = RowError("prompt_invalid", "the column is empty")
    refused = replace(
        request(50, [], samples=(0, 2)), refusal=Refusal(FinishReason.ERROR, error), payload="kept"
    )
    skipped = replace(request(51, []), refusal=Refusal(FinishReason.SKIPPED))
    good = rows(3)
    engine = make_engine(loaded_family("llama"), mode=mode)
    found = by_key(engine.generate([refused, good[0], skipped, *good[1:]]))
    assert len(found) == 6
    for sample in (0, 2):
        completion = found[(RowKey(0, 50), sample)]
        assert (completion.finish_reason, completion.error) == (FinishReason.ERROR, error)
        assert completion.request is refused and len(completion.token_ids) == 0 and completion.text is None
    assert found[(RowKey(0, 51), 0)].finish_reason is FinishReason.SKIPPED
    assert found[(RowKey(0, 51), 0)].error is None
    expected = tokens(make_engine(loaded_family("llama")).generate(good))
    assert all(found[key].token_ids.tolist() == ids for key, ids in expected.items())


@MODES
def test_only_refusals(mode: EngineMode) -> None:
    refused = [replace(r, refusal=Refusal(FinishReason.SKIPPED)) for r in rows()]
    engine = make_engine(loaded_family("llama"), mode=mode, max_num_seqs=2)
    assert len(by_key(engine.generate(refused))) == 12
    assert engine.stats.counters.num_steps == 0


@MODES
def test_a_prompt_too_long_is_a_row_and_the_others_go_on(mode: EngineMode) -> None:
    limit = loaded_family("llama").max_model_len
    lengths = (10, limit + 1, 10)
    requests = [request(i, np.ones(n), samples=(0, 1), max_tokens=4) for i, n in enumerate(lengths)]
    found = by_key(make_engine(loaded_family("llama"), mode=mode).generate(requests))
    assert len(found) == 6
    for sample in (0, 1):
        error = found[(RowKey(0, 1), sample)].error
        assert error is not None and error.code == "prompt_too_long"
        assert str(limit + 1) in error.message and str(limit) in error.message
        assert all(len(found[(RowKey(0, r), sample)].token_ids) for r in (0, 2))


@MODES
def test_a_row_larger_than_the_cache_is_a_row_and_the_others_go_on(mode: EngineMode) -> None:
    """Five blocks of 16 can be owned: 80 positions."""
    engine = make_engine(loaded_family("llama"), mode=mode, num_blocks=6)
    requests = [
        request(0, np.ones(70), max_tokens=10, ignore_eos=True),
        request(1, np.ones(70), max_tokens=11, ignore_eos=True),
        request(2, np.ones(200), max_tokens=4),
        request(3, np.ones(3), max_tokens=4, ignore_eos=True),
    ]
    done = by_key(engine.generate(requests))
    found = {key.row: c for (key, _), c in done.items()}
    assert (len(found[0].token_ids), len(found[3].token_ids)) == (10, 4)
    for row in (1, 2):
        error = found[row].error
        assert found[row].finish_reason is FinishReason.ERROR and error is not None
        assert error.code == "row_exceeds_kv_cache"
        assert "engine.num_blocks=6" in error.message and "raise" in error.message


@MODES
@pytest.mark.parametrize("wrong", [VOCABULARY, 10**6, -1])
def test_an_id_outside_the_vocabulary_is_a_row_and_the_others_go_on(mode: EngineMode, wrong: int) -> None:
    requests = [request(0, [1, 2]), request(1, [1, wrong, 2]), request(2, [3])]
    found = by_key(make_engine(loaded_family("llama"), mode=mode).generate(requests))
    error = found[(RowKey(0, 1), 0)].error
    assert error is not None and error.code == "prompt_invalid" and str(wrong) in error.message
    assert all(found[(RowKey(0, r), 0)].error is None for r in (0, 2))


def test_stop_strings_without_a_tokenizer_are_not_blamed_on_the_cache() -> None:
    """It is the caller's mistake and concerns every row: either an exception, or a fitting code."""
    engine = make_engine(loaded_family("llama"))
    try:
        (completion,) = engine.generate([request(0, [1, 2], stop=("a",))])
    except ValueError as error:
        assert "tokenizer" in str(error)
    else:
        assert completion.error is not None and completion.error.code != "row_exceeds_kv_cache"


@pytest.mark.parametrize("params", [{"logprobs": True}, {"top_logprobs": 2}])
def test_logprobs_that_the_engine_does_not_record_are_not_given_as_empty(params: dict[str, Any]) -> None:
    """Asked of an engine that was made without: an error that says so, or the values."""
    engine = make_engine(loaded_family("llama"))
    try:
        (completion,) = engine.generate([request(0, [1, 2], max_tokens=3, ignore_eos=True, **params)])
    except ValueError as error:
        assert "logprobs" in str(error)
        return
    if completion.error is None:
        assert completion.logprobs is not None and len(completion.logprobs) == 3


def test_settings_that_cannot_work_name_their_key() -> None:
    loaded = loaded_family("llama")
    with pytest.raises(ValueError, match=r"output\.topk=129"):
        make_engine(loaded, num_topk=129)
    with pytest.raises(ValueError, match=r"engine\.kv_cache_gb=1e-06"):
        make_engine(loaded, kv_cache_gb=1e-6)


@MODES
def test_a_slow_caller_does_not_confuse_the_engine(mode: EngineMode) -> None:
    engine = make_engine(loaded_family("llama"), mode=mode, max_num_seqs=4)
    expected = tokens(make_engine(loaded_family("llama")).generate(rows(6)))
    got = {}
    for completion in engine.generate(rows(6)):
        time.sleep(0.005)
        got[(completion.request.key, completion.sample)] = completion.token_ids.tolist()
    assert got == expected
