"""Greedy rows equal transformers' generate, whatever the engine does behind them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fakes import Case, by_key, loaded_family, make_engine, mixed_prompts, request

from pipeline.config import EngineMode
from pipeline.engine import Engine, FinishReason, Request, RowKey

# Per feature, what switches it off and on. Eight rows of 240 positions fit into 2,048 tokens, and so
# does all that a pool of one row's blocks can hold.
CHUNKED = {False: {"max_num_batched_tokens": 2048}, True: {"max_num_batched_tokens": 48}}
SHARING = {False: {"prefix_sharing": False}, True: {"prefix_sharing": True}}
ON_AND_OFF = list(itertools.product(EngineMode, (False, True), (False, True), (False, True)))


@pytest.mark.parametrize(
    ("mode", "chunked", "sharing", "preempted"),
    ON_AND_OFF,
    ids=[f"{m.value}-chunks_{c}-sharing_{s}-preemption_{p}".lower() for m, c, s, p in ON_AND_OFF],
)
def test_greedy_equals_generate(
    case: Case, mode: EngineMode, chunked: bool, sharing: bool, preempted: bool
) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 8, **CHUNKED[chunked], **SHARING[sharing]}
    if preempted:
        fewest = case.fewest_blocks(16, settings["max_num_batched_tokens"])
        settings |= {"reserve": 0.0, "num_blocks": fewest, "max_num_seqs": 24}
    engine = make_engine(case.loaded, mode=mode, **settings)
    assert len(case.prompts) == 64
    found = by_key(engine.generate(case.requests()))

    for row, expected in enumerate(case.expected):
        completion = found.pop((RowKey(0, row), 0))
        assert completion.token_ids.tolist() == expected.tolist(), f"row {row}"
        stopped = int(expected[-1]) in case.loaded.eos_ids
        assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert completion.error is None
    assert not found
    fired = engine.stats.counters
    assert (fired.num_partial_prefill_chunks > 0) is chunked
    assert (fired.num_shared_blocks > 0) is sharing
    if chunked or case.window is None:
        assert (fired.num_preemptions > 0) is preempted
    # else: a pool that takes the longest prompt in one piece has room for 24 windows; see below.
    assert (fired.num_wasted_row_steps > 0) is (mode is EngineMode.async_)
    assert_idle(engine)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("mode", EngineMode)
def test_preemption_of_short_rows_in_one_piece(case: Case, mode: EngineMode, sharing: bool) -> None:
    """Five blocks for rows that come to four: they grow at each other's expense, sliding window or not."""
    short = [row for row, p in enumerate(case.prompts) if len(p) + case.max_tokens[row] <= 64]
    assert len(short) > 15
    engine = make_engine(
        case.loaded, mode=mode, max_num_seqs=24, num_blocks=6, reserve=0.0, prefix_sharing=sharing
    )
    found = by_key(engine.generate([case.requests()[row] for row in short]))
    for row in short:
        assert found[(RowKey(0, row), 0)].token_ids.tolist() == case.expected[row].tolist(), f"row {row}"
    fired = engine.stats.counters
    assert fired.num_preemptions > 0 and fired.num_partial_prefill_chunks == 0
    assert_idle(engine)


def test_the_reference_is_worth_comparing_with(case: Case) -> None:
    stopped = [int(e[-1]) in case.loaded.eos_ids for e in case.expected]
    assert 5 < sum(stopped) < 60
    lengths = sorted(map(len, case.prompts))
    assert lengths[0] == 1 and lengths[-1] > 100 and len(set(lengths)) > 15
    assert len({e.tobytes() for e in case.expected}) > 30


@pytest.mark.parametrize("mode", EngineMode)
def test_everything_at_once_with_64_rows(case: Case, mode: EngineMode) -> None:
    engine = make_engine(case.loaded, mode=mode, max_num_seqs=64, max_num_batched_tokens=96)
    found = by_key(engine.generate(case.requests()))
    for row, expected in enumerate(case.expected):
        assert found[(RowKey(0, row), 0)].token_ids.tolist() == expected.tolist(), f"row {row}"


@pytest.mark.parametrize("mode", EngineMode)
def test_fewer_tokens_a_step_than_rows(mode: EngineMode) -> None:
    loaded = loaded_family("llama")
    requests = [request(i, p, max_tokens=6) for i, p in enumerate(mixed_prompts(12))]
    wide = by_key(make_engine(loaded, mode=mode).generate(requests))
    narrow_engine = make_engine(loaded, mode=mode, max_num_seqs=8, max_num_batched_tokens=3)
    narrow = by_key(narrow_engine.generate(requests))
    assert {k: c.token_ids.tolist() for k, c in narrow.items()} == {
        k: c.token_ids.tolist() for k, c in wide.items()
    }


@pytest.mark.parametrize("mode", EngineMode)
def test_two_calls_in_turn_give_the_same(mode: EngineMode) -> None:
    engine = make_engine(loaded_family("llama"), mode=mode, seed=5)
    requests = [request(i, p, max_tokens=10, temperature=1.0) for i, p in enumerate(mixed_prompts(12))]
    first = by_key(engine.generate(requests))
    second = by_key(engine.generate(requests))
    assert {k: c.token_ids.tolist() for k, c in first.items()} == {
        k: c.token_ids.tolist() for k, c in second.items()
    }
    assert len(first) == 12


def test_no_requests_is_fine() -> None:
    engine = make_engine(loaded_family("llama"))
    assert list(engine.generate([])) == []
    assert engine.stats.counters.num_steps == 0


def test_requests_are_pulled_lazily() -> None:
    pulled = 0

    def endless() -> Iterator[Request]:
        nonlocal pulled
        while True:
            pulled += 1
            yield request(pulled, [1, 2, 3], max_tokens=4, ignore_eos=True)

    engine = make_engine(loaded_family("llama"), max_num_seqs=4)
    completions = engine.generate(endless())
    for _ in range(20):
        next(completions)
    # Twenty finished, at most four running, four waiting and one step's worth being handed out.
    assert pulled <= 20 + 4 * 3
    assert engine.stats.num_waiting <= 4 and engine.stats.num_running <= 4
    completions.close()  # type: ignore[attr-defined]
    assert_idle(engine)


class Halting:
    """Requests that are not there yet most of the time; waiting for one would be noticed."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self._asked = 0
        self.waited_while_running = False
        self.engine: Engine | None = None

    def ready(self) -> bool:
        self._asked += 1
        return self._asked % 3 == 0

    def __iter__(self) -> Iterator[Request]:
        for one in self._requests:
            assert self.engine is not None
            unready = self._asked % 3 != 0
            self.waited_while_running |= unready and self.engine.stats.num_running > 0
            yield one


@pytest.mark.parametrize("mode", EngineMode)
def test_a_feed_that_is_not_ready_is_not_waited_for(mode: EngineMode) -> None:
    loaded = loaded_family("llama")
    requests = [request(i, p, max_tokens=8) for i, p in enumerate(mixed_prompts(16))]
    expected = by_key(make_engine(loaded, mode=mode).generate(requests))
    feed = Halting(requests)
    feed.engine = engine = make_engine(loaded, mode=mode)
    found = by_key(engine.generate(feed))
    assert not feed.waited_while_running
    assert {k: c.token_ids.tolist() for k, c in found.items()} == {
        k: c.token_ids.tolist() for k, c in expected.items()
    }


@pytest.mark.parametrize("mode", EngineMode)
def test_counts_of_tokens(mode: EngineMode) -> None:
    engine = make_engine(loaded_family("llama"), mode=mode)
    done = list(
        engine.generate([request(i, p, max_tokens=8, samples=(0, 1)) for i, p in enumerate(mixed_prompts(6))])
    )
    stats = engine.stats
    assert stats.completion_tokens == sum(len(c.token_ids) for c in done)
    assert stats.prompt_tokens == sum(len(c.request.prompt_ids) for c in done)
    assert stats.busy_seconds > 0


def test_payload_and_request_come_back_untouched() -> None:
    payload = object()
    asked = request(9, [1, 2, 3], file=4, max_tokens=2)
    asked = Request(asked.key, asked.prompt_ids, asked.params, prompt="abc", payload=payload)
    (completion,) = make_engine(loaded_family("llama")).generate([asked])
    assert completion.request is asked and completion.request.payload is payload
    assert completion.token_ids.dtype == np.int32
    assert completion.logprobs is None and completion.topk_ids is None


def assert_idle(engine: Engine) -> None:
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.kv_use) == (0, 0, 0.0)
