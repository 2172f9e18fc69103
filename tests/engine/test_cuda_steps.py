"""The GPU engine's steps without a GPU: its buffers, kernels and carry-over through Triton's interpreter.

Streams, graphs and timing are not here: they are tested where there is a GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import numpy as np
import pytest
import torch
from fakes import family_config, make_engine, random_model, request

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)
_triton = sys.modules.get("triton")
if not torch.cuda.is_available() and not (_triton and _triton.knobs.runtime.interpret):
    importlib.import_module("kernels.conftest")

from pipeline.engine.batch import StepInputs, build_inputs  # noqa: E402
from pipeline.engine.block_manager import BlockManager  # noqa: E402
from pipeline.engine.block_tables import BlockGroup, BlockTables  # noqa: E402
from pipeline.engine.cuda_graphs import GraphKey, StepEnd, StepGraphs  # noqa: E402
from pipeline.engine.cuda_runner import CudaRunner, pack  # noqa: E402
from pipeline.engine.cuda_sampler import CudaSampler  # noqa: E402
from pipeline.engine.cuda_trials import logits_of_equal_rows  # noqa: E402
from pipeline.engine.invariant_sizes import find_invariant_sizes  # noqa: E402
from pipeline.engine.kv_cache import KVCache, KVShape  # noqa: E402
from pipeline.engine.model_runner import StepOutput  # noqa: E402
from pipeline.engine.scheduler import Scheduler  # noqa: E402
from pipeline.engine.sequence import SequenceTable, TokenLogprobs, make_sequence  # noqa: E402
from pipeline.engine.slot_state import SlotMirror  # noqa: E402
from pipeline.engine.step_buffers import fill  # noqa: E402
from pipeline.models.forward import make_forward  # noqa: E402
from pipeline.models.layers import layers_by_window  # noqa: E402
from pipeline.models.load import LoadedModel, wrap_model  # noqa: E402
from pipeline.request import Completion, Request, RowKey  # noqa: E402

BLOCK_SIZE, NUM_SLOTS, MAX_TOKENS = 16, 3, 24


class EagerGraphs(StepGraphs):
    """Stands where captured graphs are: replaying computes."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner

    def replay(self, key: GraphKey) -> None:
        self._runner.compute(key)


class Driver:
    """What the slots do on a GPU, in turn and without streams. num_sent: of each step, bytes that went up."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        fused: bool,
        graphs: bool | str,
        num_topk: int = 0,
        bitwise: bool = False,
    ) -> None:
        layers, a = layers_by_window(loaded), loaded.architecture
        self.windows = tuple(layers)
        longest = -(-loaded.max_model_len // BLOCK_SIZE)
        groups = [
            BlockGroup(w, BlockManager(64, BLOCK_SIZE), NUM_SLOTS, longest, MAX_TOKENS) for w in self.windows
        ]
        self.blocks, self.table = BlockTables(groups), SequenceTable(NUM_SLOTS, num_topk)
        self.scheduler = Scheduler(self.table, self.blocks, max_num_batched_tokens=MAX_TOKENS)
        shape = KVShape(a.num_kv_heads, a.head_dim, loaded.dtype)
        forward, kind = make_forward(loaded, fused)
        assert (kind == "fused") is fused
        self.runner = CudaRunner(
            loaded=loaded,
            cache=KVCache(shape, dict.fromkeys(range(a.num_layers), 64), BLOCK_SIZE, loaded.device),
            sampler=CudaSampler(loaded.vocab_size, num_topk=num_topk),
            forward=forward,
            windows=self.windows,
            blocks_per_row=longest,
            num_slots=NUM_SLOTS,
            graph_sizes=(2, 4) if graphs else (),
            sent_sizes=(8, MAX_TOKENS) if graphs == "all" else (),
            invariant_sizes=(4, 16, 24) if bitwise else None,
        )
        self.runner.graphs = EagerGraphs(self.runner)
        for size in self.runner.sent_sizes:
            # As before a capture: what is left of it must not be taken for a row.
            self.runner.compute_padding(GraphKey(False, size, StepEnd.SAMPLED))
        self.mirror = SlotMirror(NUM_SLOTS, len(self.windows), longest)
        self.loaded = loaded
        self.num_sent: list[int] = []

    def generate(self, requests: list[Request]) -> dict[RowKey, Completion]:
        for one in requests:
            self.scheduler.add(
                make_sequence(
                    one,
                    0,
                    seed=0,
                    max_model_len=self.loaded.max_model_len,
                    eos_ids=self.loaded.eos_ids,
                    matcher=None,
                    block_hashes=[],
                )
            )
        outputs = {}
        while (schedule := self.scheduler.schedule()) is not None:
            output = self.step(build_inputs(schedule, self.table, self.blocks))
            logprobs = None
            if output.logprobs is not None:
                assert output.topk_ids is not None and output.topk_logprobs is not None
                logprobs = TokenLogprobs(output.logprobs, output.topk_ids, output.topk_logprobs)
            for ended in self.scheduler.update(schedule, output.ids, logprobs):
                outputs[ended.request.key] = ended
        return outputs

    def step(self, inputs: StepInputs) -> StepOutput:
        runner, shape = self.runner, self.runner.shape_of(inputs)
        if not shape.is_made:
            buffer = np.zeros(shape.layout.num_bytes, np.uint8)
            fill(shape.layout.arrays(buffer), inputs, self.windows, NUM_SLOTS)
            self.mirror.advance(inputs)
            output = runner.run(shape, torch.from_numpy(buffer).to(self.loaded.device), inputs)
        else:
            changes = self.mirror.changes(inputs, shape.graph.size)
            words = np.zeros(changes.num_words, np.int32)
            assert pack(changes, words) == changes.num_words
            self.num_sent.append(words.nbytes)
            assert changes.any is (words.nbytes > 0)
            runner.apply(changes, torch.from_numpy(words).to(self.loaded.device))
            output = runner.replay(shape, inputs)
        if output is None:
            return StepOutput(np.empty(0, np.int32), None, None, None)
        return output.read(runner.output.cpu().numpy(), len(inputs.logits_index))


def tokens_of(completions: Any) -> dict[RowKey, list[int]]:
    return {key: ended.tokens[ended.num_prompt_tokens :].tolist() for key, ended in completions.items()}


def mixed_requests(**params: Any) -> list[Request]:
    """Rows of several lengths, more than there are slots; some drawn, some greedy."""
    rng = np.random.default_rng(0)
    return [
        request(row, rng.integers(2, 100, length).tolist(), max_tokens=7, temperature=temperature, **params)
        for row, (length, temperature) in enumerate([(5, 0.0), (30, 0.0), (17, 1.0), (1, 0.0)])
    ]


def cpu_tokens(family: str, requests: list[Request]) -> dict[RowKey, list[int]]:
    engine = make_engine(wrap_model(random_model(family_config(family))))
    return {c.request.key: c.token_ids.tolist() for c in engine.generate(requests)}


@pytest.mark.parametrize(
    ("family", "fused", "graphs"),
    [("llama", True, "all"), ("mistral", False, True), ("qwen3", True, False)],
    ids=["llama, all captured", "mistral, decode captured", "qwen3, eager"],
)
@torch.inference_mode()
def test_tokens_equal_the_cpu_engine(family: str, fused: bool, graphs: bool | str) -> None:
    driver = Driver(wrap_model(random_model(family_config(family))), fused=fused, graphs=graphs)
    requests = mixed_requests()
    assert tokens_of(driver.generate(requests)) == cpu_tokens(family, requests)
    assert bool(driver.num_sent) is bool(graphs)


@torch.inference_mode()
def test_filters_and_edits_equal_the_cpu_engine() -> None:
    """Rows that leave the graph at the logits beside rows that do not."""
    driver = Driver(wrap_model(random_model(family_config("llama"))), fused=True, graphs=True)
    asked = ({"top_p": 0.7, "top_k": 20}, {"min_p": 0.05}, {"repetition_penalty": 1.3}, {"min_tokens": 3})
    requests = [
        request(row, [row + 5] * (row + 2), max_tokens=6, temperature=1.0, **params)
        for row, params in enumerate(asked)
    ]
    assert tokens_of(driver.generate(requests)) == cpu_tokens("llama", requests)


@torch.inference_mode()
def test_a_step_of_the_same_rows_sends_nothing_until_a_row_needs_a_block() -> None:
    driver = Driver(wrap_model(random_model(family_config("llama"))), fused=True, graphs=True)
    requests = [request(row, [5 + row] * 3, max_tokens=40) for row in range(2)]
    driver.generate(requests)
    # The first step of decoding rows sends both; a block has room for 16 positions of a row.
    sent = [step for step, num_bytes in enumerate(driver.num_sent) if num_bytes]
    assert sent[0] == 0 and len(driver.num_sent) == 39
    assert sent[1:] == [13, 29]
    # A place and a block for each of the two rows.
    assert [driver.num_sent[step] for step in sent[1:]] == [16, 16]


@torch.inference_mode()
def test_recorded_alternatives_equal_the_cpu_engine() -> None:
    requests = mixed_requests(top_logprobs=4, logprobs=True)
    engine = make_engine(wrap_model(random_model(family_config("llama"))), num_topk=4)
    expected = {c.request.key: c for c in engine.generate(requests)}
    driver = Driver(wrap_model(random_model(family_config("llama"))), fused=True, graphs=True, num_topk=4)
    for key, got in driver.generate(requests).items():
        assert got.tokens[got.num_prompt_tokens :].tolist() == expected[key].token_ids.tolist()
        assert got.logprobs.topk_ids.tolist() == expected[key].topk_ids.tolist()
        np.testing.assert_allclose(got.logprobs.topk_logprobs, expected[key].topk_logprobs, atol=1e-4)
        np.testing.assert_allclose(got.logprobs.logprobs, expected[key].logprobs, atol=1e-4)


@torch.inference_mode()
def test_bitwise_steps_take_one_way_for_all_rows_and_equal_the_cpu_engine() -> None:
    family = "mistral"
    requests = mixed_requests()
    driver = Driver(wrap_model(random_model(family_config(family))), fused=True, graphs=True, bitwise=True)
    assert tokens_of(driver.generate(requests)) == cpu_tokens(family, requests)


@torch.inference_mode()
def test_equal_rows_are_equal_wherever_they_stand() -> None:
    driver = Driver(wrap_model(random_model(family_config("qwen3"))), fused=True, graphs=False)
    rows = logits_of_equal_rows(driver.runner, 7, 5)
    assert rows.shape[0] == 5 and rows.abs().sum() > 0
    torch.testing.assert_close(rows, rows[:1].expand_as(rows))
    assert find_invariant_sizes([4], lambda size: rows[:1].expand(size, -1)) == (4,)


def test_what_a_step_ends_with() -> None:
    """Decode graphs go all the way, unless the host edits some row's logits."""
    runner = Driver(wrap_model(random_model(family_config("llama"))), fused=True, graphs=True).runner
    for params, end in (
        ({"temperature": 0.0}, StepEnd.SAMPLED),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, StepEnd.SAMPLED),
        ({"temperature": 0.0, "repetition_penalty": 1.2}, StepEnd.LOGITS),
        ({"temperature": 0.0, "logit_bias": ((3, 1.0),)}, StepEnd.LOGITS),
        ({"temperature": 0.0, "min_tokens": 4, "stop_token_ids": (7,)}, StepEnd.LOGITS),
    ):
        table = SequenceTable(2)
        blocks = BlockTables([BlockGroup(None, BlockManager(8, 16), 2, 4, 32)])
        scheduler = Scheduler(table, blocks, max_num_batched_tokens=32)
        one = request(0, [3], max_tokens=8, **params)
        scheduler.add(
            make_sequence(one, 0, seed=0, max_model_len=32, eos_ids=(), matcher=None, block_hashes=[])
        )
        schedule = scheduler.schedule()
        assert schedule is not None
        graph = runner.shape_of(build_inputs(schedule, table, blocks)).graph
        assert graph == GraphKey(True, 2, end), params
