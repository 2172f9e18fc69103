"""Sampled rows depend on (seed, key, sample) and their prompt alone, to the last bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from fakes import by_key, family_config, loaded_family, make_engine, mixed_prompts, random_model, request

from pipeline.config import EngineMode
from pipeline.engine import Completion, Request, RowKey
from pipeline.models.load import LoadedModel

Found = dict[tuple[RowKey, int], Completion]
NUM_TOPK = 3
# Rows next to each other differ in how they are sampled: a neighbour's filter may not show.
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 0.0},
    {"temperature": 1.7, "min_p": 0.05, "top_k": 40, "top_p": 0.95},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
)


def rows() -> list[Request]:
    prompts = mixed_prompts(24, seed=3)
    prompts += prompts[2:4]
    limits = (30, 2, 17, 1, 9)
    return [
        request(
            row,
            prompt,
            file=row % 2,
            samples=(0, 1) if row % 3 == 0 else (0,),
            logprobs=True,
            top_logprobs=NUM_TOPK,
            max_tokens=limits[row % 5],
            min_tokens=row % 2,
            **{"temperature": 1.0, **SAMPLING[row % len(SAMPLING)]},
        )
        for row, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return loaded_family(request.param)


@pytest.fixture(scope="module")
def baseline(loaded: LoadedModel) -> Found:
    found = by_key(make_engine(loaded, seed=11, num_topk=NUM_TOPK, max_num_seqs=64).generate(rows()))
    assert len({c.token_ids.tobytes() for c in found.values()}) > 20
    return found


def assert_bitwise_equal(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for key, want in expected.items():
        got = found[key]
        assert got.token_ids.tolist() == want.token_ids.tolist(), key
        assert got.finish_reason is want.finish_reason, key
        for name in ("logprobs", "topk_ids", "topk_logprobs"):
            a, b = getattr(got, name), getattr(want, name)
            assert len(a) == len(want.token_ids), (key, name)
            assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), (key, name)


@pytest.mark.parametrize("mode", EngineMode)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"max_num_seqs": 64},
        {"max_num_batched_tokens": 17},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 1024},
        {"prefix_sharing": False},
        {"prefix_sharing": False, "max_num_batched_tokens": 33, "max_num_seqs": 5},
    ],
    ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.items()),
)
def test_settings_do_not_show(
    loaded: LoadedModel, baseline: Found, mode: EngineMode, settings: dict[str, Any]
) -> None:
    engine = make_engine(loaded, seed=11, num_topk=NUM_TOPK, mode=mode, **settings)
    assert_bitwise_equal(by_key(engine.generate(rows())), baseline)
    assert (engine.stats.counters.num_shared_blocks > 0) is settings.get("prefix_sharing", True)


@pytest.mark.parametrize("mode", EngineMode)
@pytest.mark.parametrize("sharing", [False, True])
def test_preemption_does_not_show(
    loaded: LoadedModel, baseline: Found, mode: EngineMode, sharing: bool
) -> None:
    # Barely room for the longest row; under a sliding window that is a window and a chunk.
    sliding = loaded.model.config.model_type == "mistral"
    engine = make_engine(
        loaded,
        seed=11,
        num_topk=NUM_TOPK,
        mode=mode,
        num_blocks=7 if sliding else 16,
        max_num_batched_tokens=48 if sliding else 512,
        reserve=0.0,
        prefix_sharing=sharing,
    )
    assert_bitwise_equal(by_key(engine.generate(rows())), baseline)
    assert engine.stats.counters.num_preemptions > 0


@pytest.mark.parametrize("mode", EngineMode)
def test_the_order_of_the_input_does_not_show(loaded: LoadedModel, baseline: Found, mode: EngineMode) -> None:
    for seed in (1, 2):
        shuffled = rows()
        random.Random(seed).shuffle(shuffled)
        engine = make_engine(loaded, seed=11, num_topk=NUM_TOPK, mode=mode, max_num_seqs=6)
        assert_bitwise_equal(by_key(engine.generate(shuffled)), baseline)


@pytest.mark.parametrize("mode", EngineMode)
@pytest.mark.parametrize("done_before", [1, 9, 25])
def test_an_interruption_does_not_show(
    loaded: LoadedModel, baseline: Found, mode: EngineMode, done_before: int
) -> None:
    """Closed after some completions; a new engine makes what is missing, single samples included."""

    def engine(**config: Any) -> Any:
        return make_engine(loaded, seed=11, num_topk=NUM_TOPK, mode=mode, max_num_seqs=8, **config)

    completions = engine().generate(rows())
    first = by_key(next(completions) for _ in range(done_before))
    completions.close()
    missing = [
        Request(r.key, r.prompt_ids, r.params, samples=left)
        for r in rows()
        if (left := tuple(s for s in r.samples if (r.key, s) not in first))
    ]
    second = by_key(engine(max_num_batched_tokens=40).generate(missing))
    assert not first.keys() & second.keys()
    assert_bitwise_equal({**first, **second}, baseline)


@pytest.mark.parametrize("mode", EngineMode)
def test_a_stop_on_request_does_not_show(loaded: LoadedModel, baseline: Found, mode: EngineMode) -> None:
    engine = make_engine(loaded, seed=11, num_topk=NUM_TOPK, mode=mode, max_num_seqs=8)
    got: list[Completion] = []
    for completion in engine.generate(rows(), should_stop=lambda: len(got) >= 9):
        got.append(completion)
    assert 9 <= len(got) < len(baseline)
    assert (engine.stats.num_running, engine.stats.num_waiting, engine.stats.kv_use) == (0, 0, 0.0)
    first = by_key(got)
    assert_bitwise_equal(first, {key: baseline[key] for key in first})
    assert_bitwise_equal(by_key(engine.generate(rows())), baseline)


def test_a_closed_engine_can_be_used_again(loaded: LoadedModel, baseline: Found) -> None:
    """What was in flight, and the prefixes it left in the cache, do not show in the next call."""
    for mode in EngineMode:
        engine = make_engine(loaded, seed=11, num_topk=NUM_TOPK, mode=mode, max_num_seqs=8)
        for taken in (1, 5):
            completions = engine.generate(rows())
            for _ in range(taken):
                next(completions)
            completions.close()  # type: ignore[attr-defined]
        assert (engine.stats.num_running, engine.stats.kv_use) == (0, 0.0)
        assert_bitwise_equal(by_key(engine.generate(rows())), baseline)


def test_equal_prompts_get_different_samples(loaded: LoadedModel) -> None:
    prompt = np.arange(20, dtype=np.int32)
    twins = [request(row, prompt, temperature=1.0, max_tokens=16, ignore_eos=True) for row in range(6)]
    twins.append(request(0, prompt, file=1, temperature=1.0, max_tokens=16, ignore_eos=True))
    twins.append(request(2**33, prompt, temperature=1.0, max_tokens=16, ignore_eos=True))
    found = by_key(make_engine(loaded, seed=1).generate(twins))
    assert len({c.token_ids.tobytes() for c in found.values()}) == len(twins)
    again = by_key(make_engine(loaded, seed=1).generate(twins))
    assert all(again[k].token_ids.tolist() == c.token_ids.tolist() for k, c in found.items())
    other_seed = by_key(make_engine(loaded, seed=2).generate(twins))
    assert all(other_seed[k].token_ids.tolist() != c.token_ids.tolist() for k, c in found.items())


def test_a_sample_does_not_depend_on_how_many_there_are(loaded: LoadedModel) -> None:
    def samples(numbers: tuple[int, ...]) -> dict[int, list[int]]:
        asked = [
            request(row, p, samples=numbers, temperature=1.0, max_tokens=12, ignore_eos=True)
            for row, p in enumerate(mixed_prompts(3))
        ]
        done = by_key(make_engine(loaded, max_num_seqs=5).generate(asked))
        return {s: [t for r in range(3) for t in done[(RowKey(0, r), s)].token_ids.tolist()] for s in numbers}

    eight = samples(tuple(range(8)))
    assert len({tuple(ids) for ids in eight.values()}) == 8
    assert samples(tuple(range(4))) == {s: eight[s] for s in range(4)}
    assert samples((6,)) == {6: eight[6]}


def test_logprobs_are_those_of_a_plain_forward(loaded: LoadedModel, baseline: Found) -> None:
    """Temperature and filters do not show in them; a wrong row or an off-by-one would."""
    model = random_model(family_config(loaded.model.config.model_type))
    for row in (0, 1, 4, 9, 12):
        asked = rows()[row]
        completion = baseline[(asked.key, 0)]
        assert completion.logprobs is not None and completion.topk_logprobs is not None
        ids = np.concatenate([asked.prompt_ids, completion.token_ids]).astype(np.int64)
        logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        expected = logits.log_softmax(-1)[len(asked.prompt_ids) - 1 : -1].numpy()
        picked = expected[np.arange(len(completion.token_ids)), completion.token_ids]
        np.testing.assert_allclose(completion.logprobs, picked, atol=2e-4)
        best = np.sort(expected, axis=1)[:, ::-1][:, :NUM_TOPK]
        np.testing.assert_allclose(completion.topk_logprobs, best, atol=2e-4)
        assert completion.topk_ids is not None
        np.testing.assert_array_equal(completion.topk_ids[:, 0], expected.argmax(axis=1))
