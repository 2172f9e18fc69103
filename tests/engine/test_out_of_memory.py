"""A step that finds no memory: its rows go back, the next steps are smaller, and every row comes out."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from fakes import by_key, loaded_family, make_engine, mixed_prompts, request

from pipeline.config import EngineMode
from pipeline.engine import Engine, Request


def requests() -> list[Request]:
    return [
        request(row, ids, max_tokens=10, temperature=float(row % 2))
        for row, ids in enumerate(mixed_prompts(20))
    ]


def fail_at(engine: Engine, *calls: int) -> list[int]:
    """Let the runner's calls of these numbers find no memory; returns the tokens of each step."""
    runner, tokens = engine._runner, []
    run = runner.run

    def failing(inputs: Any) -> Any:
        tokens.append(inputs.num_tokens)
        if len(tokens) in calls:
            raise torch.OutOfMemoryError("injected")
        return run(inputs)

    runner.run = failing
    return tokens


@pytest.mark.parametrize("mode", list(EngineMode))
@pytest.mark.parametrize("calls", [(1,), (5,), (4, 5, 6), (12, 30)], ids=str)
def test_all_rows_come_out_as_without_it(mode: EngineMode, calls: tuple[int, ...]) -> None:
    expected = by_key(make_engine(loaded_family("llama")).generate(requests()))
    engine = make_engine(loaded_family("llama"), mode=mode, max_num_batched_tokens=64)
    fail_at(engine, *calls)
    with pytest.warns(UserWarning, match=r"ran out of memory.*engine\.max_num_seqs"):
        got = by_key(engine.generate(requests()))
    assert {key: c.token_ids.tolist() for key, c in got.items()} == {
        key: c.token_ids.tolist() for key, c in expected.items()
    }
    assert 1 <= engine.stats.counters.num_retreats <= len(calls)
    assert engine.stats.kv_use == 0 and engine.stats.num_running == 0


def test_steps_are_smaller_afterwards() -> None:
    engine = make_engine(loaded_family("llama"), mode=EngineMode.sync, max_num_batched_tokens=128)
    tokens = fail_at(engine, 3)
    with warnings.catch_warnings(record=True):
        list(engine.generate(requests()))
    assert max(tokens[:3]) > 64 >= max(tokens[3:])


def test_where_nothing_smaller_helps_the_error_reaches_the_caller() -> None:
    engine = make_engine(loaded_family("llama"), mode=EngineMode.sync)
    fail_at(engine, *range(1, 200))
    with warnings.catch_warnings(), pytest.raises(torch.OutOfMemoryError, match="injected"):
        warnings.simplefilter("ignore")
        list(engine.generate(requests()))
    # The engine can be used again.
    del engine._runner.run
    assert len(list(engine.generate(requests()))) == 20


def test_changed_weights_are_not_answered_from_old_keys_and_values() -> None:
    loaded = loaded_family("llama")
    engine = make_engine(loaded)
    ids = np.arange(2, 80).tolist()
    first = [c.token_ids.tolist() for c in engine.generate([request(0, ids, max_tokens=8)])]
    shared = engine.stats.counters.num_shared_blocks
    list(engine.generate([request(0, ids, max_tokens=8)]))
    assert engine.stats.counters.num_shared_blocks > shared
    shared = engine.stats.counters.num_shared_blocks
    weight = loaded.model.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        weight.mul_(-1)
        changed = [c.token_ids.tolist() for c in engine.generate([request(0, ids, max_tokens=8)])]
        assert engine.stats.counters.num_shared_blocks == shared
        weight.mul_(-1)
    assert changed != first
    assert [c.token_ids.tolist() for c in engine.generate([request(0, ids, max_tokens=8)])] == first
