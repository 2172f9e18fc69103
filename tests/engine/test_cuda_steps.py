"""The GPU engine's steps without a GPU: its buffers, kernels and carry-over through Triton's interpreter.

Streams, graphs and timing are not here: they are tested where there is a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

import numpy as np
import pytest
import torch
from fakes import family_config, make_engine, random_model, request

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)
_triton = sys.modules.get("triton")
if not torch.cuda.is_available() and not (_triton and _triton.knobs.runtime.interpret):
    importlib.import_module("kernels.conftest")

from pipeline.engine.batch import build_inputs  # noqa: E402
from pipeline.engine.block_manager import BlockManager  # noqa: E402
from pipeline.engine.block_tables import BlockGroup, BlockTables  # noqa: E402
from pipeline.engine.cuda_runner import CudaRunner, StepEnd  # noqa: E402
from pipeline.engine.kv_cache import KVCache, KVShape  # noqa: E402
from pipeline.engine.sampler import Sampler  # noqa: E402
from pipeline.engine.scheduler import Scheduler  # noqa: E402
from pipeline.engine.sequence import SequenceTable, make_sequence  # noqa: E402
from pipeline.engine.step_buffers import fill  # noqa: E402
from pipeline.models.forward import make_forward  # noqa: E402
from pipeline.models.layers import layers_by_window  # noqa: E402
from pipeline.models.load import LoadedModel, wrap_model  # noqa: E402
from pipeline.request import Request, RowKey  # noqa: E402

BLOCK_SIZE, NUM_SLOTS, MAX_TOKENS = 16, 3, 24


def generate(loaded: LoadedModel, requests: list[Request], fused: bool) -> dict[RowKey, list[int]]:
    """A synchronous loop around the runner, as the slots drive it on a GPU."""
    layers, a = layers_by_window(loaded), loaded.architecture
    windows = tuple(layers)
    longest = -(-loaded.max_model_len // BLOCK_SIZE)
    groups = [BlockGroup(w, BlockManager(64, BLOCK_SIZE), NUM_SLOTS, longest, MAX_TOKENS) for w in windows]
    blocks, table = BlockTables(groups), SequenceTable(NUM_SLOTS)
    scheduler = Scheduler(table, blocks, max_num_batched_tokens=MAX_TOKENS)
    for one in requests:
        scheduler.add(
            make_sequence(
                one,
                0,
                seed=0,
                max_model_len=loaded.max_model_len,
                eos_ids=loaded.eos_ids,
                matcher=None,
                block_hashes=[],
            )
        )
    shape = KVShape(a.num_kv_heads, a.head_dim, loaded.dtype)
    forward, kind = make_forward(loaded.model, fused)
    assert (kind == "fused") is fused
    runner = CudaRunner(
        loaded=loaded,
        cache=KVCache(shape, dict.fromkeys(range(a.num_layers), 64), BLOCK_SIZE, loaded.device),
        sampler=Sampler(loaded.vocab_size),
        forward=forward,
        windows=windows,
        blocks_per_row=longest,
        num_slots=NUM_SLOTS,
        graph_sizes=(),
    )
    outputs = {}
    while (schedule := scheduler.schedule()) is not None:
        inputs = build_inputs(schedule, table, blocks)
        step = runner.shape_of(inputs)
        buffer = np.zeros(step.layout.num_bytes, np.uint8)
        fill(step.layout.arrays(buffer), inputs, windows, NUM_SLOTS)
        views = step.layout.tensors(torch.from_numpy(buffer).to(loaded.device))
        sampled = runner.run(0, step, views, inputs)
        for ended in scheduler.update(schedule, sampled.ids.cpu().numpy().astype(np.int32)):
            outputs[ended.request.key] = ended.tokens[ended.num_prompt_tokens :].tolist()
    return outputs


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("fused", [False, True], ids=["transformers", "fused"])
@torch.inference_mode()
def test_tokens_equal_the_cpu_engine(family: str, fused: bool) -> None:
    rng = np.random.default_rng(0)
    requests = [
        request(row, rng.integers(2, 100, length).tolist(), max_tokens=8, temperature=temperature)
        for row, (length, temperature) in enumerate([(5, 0.0), (30, 0.0), (17, 1.0), (1, 0.0), (40, 1.0)])
    ]
    expected = {
        c.request.key: c.token_ids.tolist()
        for c in make_engine(wrap_model(random_model(family_config(family)))).generate(requests)
    }
    assert generate(wrap_model(random_model(family_config(family))), requests, fused) == expected


def test_what_a_step_ends_with() -> None:
    """Graphs go as far as the rows' parameters allow: the likeliest ids, plain draws, or the logits."""
    loaded = wrap_model(random_model(family_config("llama")))
    runner = CudaRunner.__new__(CudaRunner)
    runner.sampler = Sampler(loaded.vocab_size)
    greedy = {"temperature": 0.0}
    for params, end in (
        ([greedy, greedy], StepEnd.GREEDY),
        ([greedy, {"temperature": 0.7}], StepEnd.DRAWN),
        ([greedy, {"temperature": 0.7, "top_p": 0.9}], StepEnd.LOGITS),
        ([greedy, {"temperature": 0.0, "repetition_penalty": 1.2}], StepEnd.LOGITS),
        ([greedy, {"temperature": 0.0, "min_tokens": 4, "stop_token_ids": (7,)}], StepEnd.LOGITS),
    ):
        table = SequenceTable(2)
        blocks = BlockTables([BlockGroup(None, BlockManager(8, 16), 2, 4, 32)])
        scheduler = Scheduler(table, blocks, max_num_batched_tokens=32)
        for row, chosen in enumerate(params):
            one = request(row, [3, 4, 5], max_tokens=8, **chosen)
            scheduler.add(
                make_sequence(one, 0, seed=0, max_model_len=32, eos_ids=(), matcher=None, block_hashes=[])
            )
        schedule = scheduler.schedule()
        assert schedule is not None
        assert runner._end(build_inputs(schedule, table, blocks).sampling) is end, params
    runner.sampler = Sampler(loaded.vocab_size, logprobs=True)
    assert runner._end(build_inputs(schedule, table, blocks).sampling) is StepEnd.LOGITS
