"""One step of the model: what is computed, what is padded, what is carried over."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from fakes import (
    FixedDraws,
    by_key,
    family_config,
    loaded_family,
    make_engine,
    mixed_prompts,
    random_model,
    request,
)

from pipeline.config import Determinism, EngineMode
from pipeline.engine import model_runner
from pipeline.engine.batch import GroupInputs, StepInputs
from pipeline.engine.invariant_sizes import find_invariant_sizes
from pipeline.engine.model_runner import ModelRunner
from pipeline.engine.sampling_inputs import SamplingInputs
from pipeline.models.load import LoadedModel, wrap_model

BLOCK_SIZE = 16


def step(
    ids: list[int], *, start: int = 0, block: int = 1, sampled: bool = True, carry: bool = False
) -> StepInputs:
    """One row in one block, greedy, in sequence slot 0."""
    positions = np.arange(start, start + len(ids), dtype=np.int64)
    count = int(sampled)
    return StepInputs(
        slots=np.zeros(1, np.int32),
        epochs=np.zeros(1, np.int64),
        num_blocks=np.ones(1, np.int32),
        input_ids=np.array(ids, np.int64),
        positions=positions,
        carry_tokens=np.arange(int(carry), dtype=np.int64),
        carry_slots=np.zeros(int(carry), np.int64),
        starts=np.array([start], np.int32),
        query_lens=np.array([len(ids)], np.int32),
        groups={None: GroupInputs(block * BLOCK_SIZE + positions, np.array([[block]], np.int32))},
        logits_index=np.full(count, len(ids) - 1, np.int64),
        sampling=SamplingInputs(
            slots=np.zeros(count, np.int64),
            temperature=np.zeros(count, np.float32),
            top_k=np.zeros(count, np.int32),
            top_p=np.ones(count, np.float32),
            min_p=np.zeros(count, np.float32),
            draws=FixedDraws(np.zeros(count)),
            forbidden=np.empty((0, 2), np.int64),
        ),
    )


@pytest.fixture
def runner() -> ModelRunner:
    return make_engine(loaded_family("llama"))._runner


def greedy(ids: list[int]) -> int:
    model = random_model(family_config("llama"))
    return int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())


def test_a_row_in_pieces_equals_the_row_at_once(runner: ModelRunner) -> None:
    ids = [5, 9, 101, 33, 7]
    assert runner.run(step(ids)).ids.tolist() == [greedy(ids)]
    runner.run(step(ids[:2], block=2, sampled=False))
    assert runner.run(step(ids[2:], start=2, block=2)).ids.tolist() == [greedy(ids)]


def test_a_step_of_chunks_alone_yields_nothing(runner: ModelRunner) -> None:
    output = runner.run(step([1, 2, 3], sampled=False))
    assert output.ids.shape == (0,) and output.logprobs is None


def test_a_carried_token_is_the_one_sampled_before(runner: ModelRunner) -> None:
    first = runner.run(step([5, 9, 101])).ids.tolist()
    # The host knows no id yet: what it sends in its place must not matter.
    carried = runner.run(step([0], start=3, carry=True)).ids.tolist()
    assert carried == [greedy([5, 9, 101, *first])]


def test_logits_are_computed_for_sampled_rows_only() -> None:
    loaded = wrap_model(random_model(family_config("llama")))
    seen: list[int] = []
    loaded.model.lm_head.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    runner = make_engine(loaded, determinism=Determinism.fast)._runner
    seen.clear()
    runner.run(step(list(range(12))))
    assert seen == [1]


def test_fast_pads_nothing_and_bitwise_pads_to_sizes_that_agree() -> None:
    loaded = wrap_model(random_model(family_config("llama")))
    seen: list[int] = []
    loaded.model.model.embed_tokens.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    fast = make_engine(loaded, determinism=Determinism.fast)._runner
    exact = make_engine(loaded, determinism=Determinism.bitwise)._runner
    assert fast.padded_sizes is None and exact.padded_sizes is not None
    seen.clear()
    fast.run(step([1, 2, 3]))
    exact.run(step([1, 2, 3]))
    assert seen[0] == 3 and seen[1] in exact.padded_sizes


def test_padding_belongs_to_nobody(runner: ModelRunner) -> None:
    """A step writes its own positions and the null block, nothing else."""
    runner.run(step(list(range(9)), block=3))
    before = [k.clone() for k in runner._cache.keys]
    runner.run(step([40, 41], block=5))
    for old, new in zip(before, runner._cache.keys, strict=True):
        changed = (old != new).flatten(2).any(-1).any(-1).nonzero()[:, 0].tolist()
        assert 5 in changed and set(changed) <= {0, 5}


@pytest.mark.parametrize("mode", EngineMode)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_fast_gives_the_same_greedy_tokens(family: str, mode: EngineMode) -> None:
    requests = [request(i, p, max_tokens=8) for i, p in enumerate(mixed_prompts(16))]
    exact, fast = (
        by_key(make_engine(loaded_family(family), mode=mode, determinism=d).generate(requests))
        for d in (Determinism.bitwise, Determinism.fast)
    )
    assert {k: c.token_ids.tolist() for k, c in exact.items()} == {
        k: c.token_ids.tolist() for k, c in fast.items()
    }


# ---------------------------------------------------------------- sizes


def rows_where(bits: Callable[[int], list[float]]) -> Callable[[int], torch.Tensor]:
    return lambda size: torch.tensor(bits(size))[:, None]


def test_a_size_whose_rows_differ_by_place_is_left_out() -> None:
    def bits(size: int) -> list[float]:
        return [1.0] * (size - 1) + [1.0 if size != 32 else 1.0000001]

    assert find_invariant_sizes([16, 32, 64], rows_where(bits)) == (16, 64)


def test_a_size_that_differs_from_the_first_good_one_is_left_out() -> None:
    values = {8: [1.0, 2.0] * 4, 16: [3.0] * 16, 32: [4.0] * 32, 64: [3.0] * 64}
    assert find_invariant_sizes([8, 16, 32, 64], rows_where(values.__getitem__)) == (16, 64)


def test_no_size_at_all() -> None:
    assert find_invariant_sizes([2, 4], rows_where(lambda size: list(map(float, range(size))))) == ()


def test_sizes_reach_the_most_tokens_of_a_step() -> None:
    for most in (1, 16, 17, 500, 700):
        sizes = make_engine(loaded_family("llama"), max_num_batched_tokens=most)._runner.padded_sizes
        assert sizes is not None and sizes[-1] >= most and sizes == tuple(sorted(set(sizes)))


def test_a_machine_without_agreeing_sizes_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def logits_of(loaded: LoadedModel, num_rows: int) -> torch.Tensor:
        return torch.arange(num_rows)[:, None] if num_rows > 64 else torch.zeros(num_rows, 1)

    monkeypatch.setattr(model_runner, "logits_of_equal_rows", logits_of)
    assert make_engine(loaded_family("llama"), max_num_batched_tokens=64)._runner.padded_sizes == (16, 32, 64)
    with pytest.raises(ValueError, match=r"engine\.determinism=bitwise.*engine\.max_num_batched_tokens"):
        make_engine(loaded_family("llama"), max_num_batched_tokens=65)


def test_loaded_family_is_untouched_by_all_this() -> None:
    loaded: LoadedModel = loaded_family("llama")
    twin = random_model(family_config("llama"))
    for mine, theirs in zip(loaded.model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)
