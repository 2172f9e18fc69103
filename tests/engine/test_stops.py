"""How a row ends: stop ids, stop strings, least and most tokens, the model's length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fakes import (
    EOS_IDS,
    PieceTokenizer,
    by_key,
    family_config,
    letter_tokenizer,
    loaded_family,
    make_engine,
    mixed_prompts,
    random_model,
    request,
    shipped_model,
    shipped_tokenizer,
)
from transformers import GenerationConfig

from pipeline.config import EngineMode
from pipeline.engine import Completion, FinishReason, Request
from pipeline.models.load import LoadedModel, wrap_model

MODES = pytest.mark.parametrize("mode", EngineMode)


def sampled_rows(count: int = 24, **params: Any) -> list[Request]:
    rows = mixed_prompts(count, seed=8)
    return [request(i, p, **{"temperature": 1.0, "max_tokens": 24, **params}) for i, p in enumerate(rows)]


def in_order(loaded: LoadedModel, requests: list[Request], **config: Any) -> list[Completion]:
    found = by_key(make_engine(loaded, seed=4, max_num_seqs=8, **config).generate(requests))
    return [found[(r.key, 0)] for r in requests]


@pytest.fixture(scope="module")
def free() -> list[list[int]]:
    """The rows' ids when nothing stops them: with the same draws, a stop only cuts them."""
    done = in_order(loaded_family("llama"), sampled_rows(ignore_eos=True))
    assert all(len(c.token_ids) == 24 and c.finish_reason is FinishReason.LENGTH for c in done)
    return [c.token_ids.tolist() for c in done]


def cut_after(ids: Sequence[int], stops: set[int]) -> list[int]:
    end = next((i + 1 for i, t in enumerate(ids) if t in stops), len(ids))
    return list(ids[:end])


def assert_cut(done: list[Completion], free: list[list[int]], stops: set[int]) -> None:
    for completion, ids in zip(done, free, strict=True):
        expected = cut_after(ids, stops)
        assert completion.token_ids.tolist() == expected
        ended = FinishReason.STOP if expected[-1] in stops else FinishReason.LENGTH
        assert completion.finish_reason is ended
    assert {c.finish_reason for c in done} == {FinishReason.STOP, FinishReason.LENGTH}


@MODES
def test_the_models_own_stop_ids(mode: EngineMode, free: list[list[int]]) -> None:
    done = in_order(loaded_family("llama"), sampled_rows(), mode=mode)
    assert_cut(done, free, set(EOS_IDS))


@MODES
def test_ids_of_generation_config_tokenizer_and_request_together(
    mode: EngineMode, free: list[list[int]]
) -> None:
    tokenizer = PieceTokenizer([b"x"] * 128, eos_token_id=64)
    loaded = wrap_model(
        random_model(family_config("llama")),
        tokenizer=tokenizer,
        generation_config=GenerationConfig(eos_token_id=[3, 29]),
    )
    assert loaded.eos_ids == (3, 29, 64)
    assert_cut(in_order(loaded, sampled_rows(), mode=mode), free, {3, 29, 64})
    with_own = in_order(loaded, sampled_rows(stop_token_ids=(5, 90, 91)), mode=mode)
    assert_cut(with_own, free, {3, 29, 64, 5, 90, 91})
    only_own = in_order(loaded, sampled_rows(stop_token_ids=(5, 90, 91), ignore_eos=True), mode=mode)
    assert_cut(only_own, free, {5, 90, 91})


@MODES
def test_rows_of_one_batch_have_their_own_stop_ids(mode: EngineMode, free: list[list[int]]) -> None:
    stops = [(), (5,), tuple(range(40, 80)), (7, 8)]
    requests = [
        request(
            i,
            p,
            temperature=1.0,
            max_tokens=24,
            ignore_eos=True,
            stop_token_ids=stops[i % 4],
        )
        for i, p in enumerate(mixed_prompts(24, seed=8))
    ]
    done = in_order(loaded_family("llama"), requests, mode=mode)
    for i, (completion, ids) in enumerate(zip(done, free, strict=True)):
        assert completion.token_ids.tolist() == cut_after(ids, set(stops[i % 4]))


@MODES
def test_the_token_that_stops_may_be_the_last_allowed(mode: EngineMode, free: list[list[int]]) -> None:
    prompt = mixed_prompts(24, seed=8)[0]
    third = free[0][2]
    assert third not in free[0][:2]
    row = request(0, prompt, temperature=1.0, max_tokens=3, ignore_eos=True, stop_token_ids=(third,))
    (done,) = in_order(loaded_family("llama"), [row], mode=mode)
    assert done.token_ids.tolist() == free[0][:3]
    assert done.finish_reason is FinishReason.STOP


@MODES
def test_min_tokens_equals_transformers(mode: EngineMode) -> None:
    model, loaded = random_model(family_config("llama")), loaded_family("llama")
    rows = mixed_prompts(12, seed=2)
    for least in (0, 1, 6, 20):
        requests = [request(i, p, max_tokens=20, min_tokens=least) for i, p in enumerate(rows)]
        for completion, prompt in zip(in_order(loaded, requests, mode=mode), rows, strict=True):
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=20,
                min_new_tokens=least or None,
                do_sample=False,
                eos_token_id=list(EOS_IDS),
                pad_token_id=0,
            )[0, len(prompt) :]
            assert completion.token_ids.tolist() == expected.tolist()


@MODES
def test_max_model_len_bounds_prompt_and_completion_together(mode: EngineMode) -> None:
    model = random_model(family_config("llama"))
    loaded = wrap_model(model, max_model_len=40)
    lengths = (1, 10, 38, 39, 40, 41, 0)
    requests = [request(i, np.arange(n) % 128, max_tokens=25, ignore_eos=True) for i, n in enumerate(lengths)]
    done = in_order(loaded, requests, mode=mode)
    assert [len(c.token_ids) for c in done] == [25, 25, 2, 1, 0, 0, 0]
    assert [c.finish_reason.value for c in done] == ["length"] * 4 + ["error"] * 3
    codes = [c.error.code if c.error else None for c in done]
    assert codes == [None] * 4 + ["prompt_too_long", "prompt_too_long", "prompt_invalid"]
    assert "41 tokens" in str(done[5].error) and "max_model_len=40" in str(done[5].error)


# ---------------------------------------------------------------- stop strings


def by_hand(ids: list[int], stops: Sequence[str], decode: Any) -> tuple[list[int], str, bool]:
    """The plain way: decode everything again after each token and look."""
    for end in range(1, len(ids) + 1):
        text = decode(ids[:end])
        hits = [at for s in stops if (at := text.find(s)) >= 0]
        if hits:
            return ids[:end], text[: min(hits)], True
    return ids, decode(ids), False


@MODES
@pytest.mark.parametrize("stops", [("ab",), ("h", "c d"), ("é",), ("ee fa", "dc", "€")])
def test_stop_strings_cut_the_text_and_keep_the_ids_up_to_them(
    mode: EngineMode, stops: tuple[str, ...], free: list[list[int]]
) -> None:
    tokenizer = letter_tokenizer()
    # A random model hardly writes a two-part character by itself: make many pieces parts of one.
    tokenizer.pieces[0::8] = ["é".encode()[:1]] * 16
    tokenizer.pieces[1::8] = ["é".encode()[1:]] * 16
    tokenizer.pieces[2::8] = [b"c d" + "é".encode()] * 16
    loaded = wrap_model(random_model(family_config("llama")), tokenizer=tokenizer)
    done = in_order(loaded, sampled_rows(stop=stops, ignore_eos=True), mode=mode)
    num_stopped = 0
    for completion, ids in zip(done, free, strict=True):
        expected_ids, expected_text, stopped = by_hand(ids, stops, tokenizer.decode)
        assert completion.token_ids.tolist() == expected_ids
        assert completion.text == expected_text
        assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        num_stopped += stopped
    assert num_stopped > 0


@MODES
def test_a_stop_string_across_tokens_of_the_shipped_model(mode: EngineMode) -> None:
    tokenizer = shipped_tokenizer()
    loaded = wrap_model(shipped_model(), tokenizer=tokenizer)
    question = [{"role": "user", "content": "Reverse this list: island, ocean, apple"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    (whole,) = in_order(loaded, [request(0, ids, max_tokens=40)], mode=mode)
    assert whole.text == "apple, ocean, island" and whole.finish_reason is FinishReason.STOP
    assert int(whole.token_ids[-1]) == 1  # the stop id is kept, students must learn it
    for stop, text in (("cean, is", "apple, o"), ("pl", "ap"), ("apple", ""), (" ocean", "apple,")):
        row = request(0, ids, max_tokens=40, stop=(stop, "never"))
        (cut,) = in_order(loaded, [row], mode=mode)
        assert (cut.text, cut.finish_reason) == (text, FinishReason.STOP)
        kept = cut.token_ids.tolist()
        assert kept == whole.token_ids.tolist()[: len(kept)]
        assert stop in tokenizer.decode(kept) and stop not in tokenizer.decode(kept[:-1])


def test_stop_strings_survive_preemption() -> None:
    loaded = wrap_model(random_model(family_config("llama")), tokenizer=letter_tokenizer())
    rows = sampled_rows(stop=("ab", "g", "c d"), ignore_eos=True, max_tokens=40)
    calm = in_order(loaded, rows)
    engine = make_engine(loaded, seed=4, max_num_seqs=8, num_blocks=17, reserve=0.0)
    pressed = by_key(engine.generate(rows))
    assert engine.stats.counters.num_preemptions > 0
    for completion in calm:
        other = pressed[(completion.request.key, 0)]
        assert (other.text, other.token_ids.tolist()) == (completion.text, completion.token_ids.tolist())
    assert any(c.finish_reason is FinishReason.STOP for c in calm)


def test_what_lies_behind_a_stop_is_dropped_from_logprobs_too() -> None:
    loaded = wrap_model(random_model(family_config("llama")), tokenizer=letter_tokenizer())
    rows = sampled_rows(stop=("a", "h"), ignore_eos=True, logprobs=True, top_logprobs=2)
    done = by_key(make_engine(loaded, num_topk=2).generate(rows))
    for completion in done.values():
        assert completion.logprobs is not None and completion.topk_ids is not None
        assert len(completion.logprobs) == len(completion.topk_ids) == len(completion.token_ids)
    assert any(c.finish_reason is FinishReason.STOP and len(c.token_ids) > 1 for c in done.values())
