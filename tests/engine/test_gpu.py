"""The engine on a real GPU: streams, events, graphs, and what they must not change.

TOKENMILL_REAL_MODEL names a folder with a real small model (SmolLM2-135M, say); without it the shipped one
stands in.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import request
from transformers import AutoModelForCausalLM, LlamaConfig

import pipeline
from pipeline.config import Determinism, Device, Dtype, EngineConfig, EngineMode, ModelConfig
from pipeline.engine import Completion, Engine, Request
from pipeline.models.load import LoadedModel, load_model, load_tokenizer, wrap_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ASSETS = Path(pipeline.__file__).parent / "assets"
ROWS = 256


@pytest.fixture(scope="module")
def model_path() -> str:
    return os.environ.get("TOKENMILL_REAL_MODEL", str(ASSETS / "tiny-model"))


@pytest.fixture(scope="module")
def loaded(model_path: str) -> LoadedModel:
    config = ModelConfig(path=model_path, device=Device.cuda, dtype=Dtype.bfloat16, max_model_len=512)
    return load_model(config, load_tokenizer(config))


def engine_of(loaded: LoadedModel, **config: Any) -> Engine:
    recorded = {name: config.pop(name) for name in ("logprobs", "num_topk") if name in config}
    settings = {"max_num_seqs": 96, "max_num_batched_tokens": 512, "block_size": 32, "num_blocks": 2000}
    return Engine(loaded, EngineConfig(**{**settings, **config}), **recorded)


def mixed_requests(loaded: LoadedModel, num_rows: int, temperature: float, **params: Any) -> list[Request]:
    """Rows of 1 to 200 tokens, of which up to 64 new ones are asked for."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 200, num_rows)
    return [
        request(
            row,
            rng.integers(3, loaded.vocab_size - 1, length).tolist(),
            max_tokens=int(rng.integers(1, 64)),
            temperature=temperature,
            **params,
        )
        for row, length in enumerate(lengths.tolist())
    ]


def outcome(completions: Iterator[Completion]) -> dict[Any, tuple[list[int], bytes]]:
    """By row: ids, and the bits of their log-probabilities."""
    return {
        c.request.key: (c.token_ids.tolist(), b"" if c.logprobs is None else c.logprobs.tobytes())
        for c in completions
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bitwise_async_sync_eager_and_any_batch_are_one(loaded: LoadedModel, temperature: float) -> None:
    """256 rows of mixed length: ids and the bits of log-probabilities, in every mode and batch shape."""
    requests = mixed_requests(loaded, ROWS, temperature, logprobs=True)
    common = {"determinism": Determinism.bitwise, "logprobs": True}
    variants: dict[str, dict[str, Any]] = {
        "async": {"mode": EngineMode.async_},
        "sync": {"mode": EngineMode.sync},
        "eager": {"mode": EngineMode.async_, "cuda_graphs": False},
        "not fused": {"mode": EngineMode.async_, "fused": False},
        "few slots": {"mode": EngineMode.async_, "max_num_seqs": 7},
        "little memory": {"mode": EngineMode.async_, "num_blocks": 60, "reserve": 0.0},
        "no sharing": {"mode": EngineMode.async_, "prefix_sharing": False},
    }
    results = {}
    for name, config in variants.items():
        engine = engine_of(loaded, **common, **config)
        results[name] = outcome(engine.generate(requests))
        if name == "little memory":
            assert engine.stats.counters.num_preemptions > 0
        del engine
        torch.cuda.empty_cache()
    expected = results.pop("async")
    assert len(expected) == ROWS
    wrong = {
        name: sum(got[key] != expected[key] for key in expected)
        for name, got in results.items()
        # Other kernels, other roundings: only that they run.
        if name != "not fused"
    }
    assert not any(wrong.values()), wrong
    assert len({tuple(ids) for ids, _ in expected.values()}) > ROWS // 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fast_rows_mostly_agree(loaded: LoadedModel, temperature: float, record_property: Any) -> None:
    """`fast` promises equal draws, not equal last bits: the share of rows that agree is printed."""
    requests = mixed_requests(loaded, ROWS, temperature)
    runs = [
        outcome(engine_of(loaded, determinism=Determinism.fast, **config).generate(requests))
        for config in ({"mode": EngineMode.async_}, {"mode": EngineMode.sync}, {"max_num_seqs": 40})
    ]
    for name, run in zip(("sync", "40 slots"), runs[1:], strict=True):
        share = sum(run[key] == runs[0][key] for key in run) / ROWS
        print(f"fast, T={temperature:g}: {share:.1%} of {ROWS} rows agree with {name}")
        assert share > 0.3


def test_the_next_batch_is_launched_before_the_ids_of_the_last_reach_the_host(loaded: LoadedModel) -> None:
    """With the copy down made slow, N+1 is on its way while N's ids are not there."""
    engine = engine_of(loaded, mode=EngineMode.async_)
    slots = engine._cuda
    copy_down, launch = slots._copy_down, slots.launch
    early: list[bool] = []

    def slow_copy_down(slot: Any) -> None:
        with torch.cuda.stream(slots._d2h):
            slots._d2h.wait_event(slot.compute_done)
            torch.cuda._sleep(40_000_000)  # some 20 ms
        copy_down(slot)

    def noted_launch(inputs: Any) -> Any:
        previous = slots._slots[(slots._num_launched + 1) % 2]
        launched = launch(inputs)
        if slots._num_launched > 1:
            early.append(not previous.d2h_done.query())
        return launched

    slots._copy_down, slots.launch = slow_copy_down, noted_launch
    requests = [request(row, [5, 6, 7 + row], max_tokens=12, ignore_eos=True) for row in range(8)]
    delayed = outcome(engine.generate(requests))
    assert sum(early) >= 10, early
    del slots._copy_down, slots.launch
    assert outcome(engine.generate(requests)) == delayed


def test_nothing_runs_on_the_default_stream(loaded: LoadedModel, tmp_path: Path) -> None:
    engine = engine_of(loaded, mode=EngineMode.async_, num_topk=4)
    requests = mixed_requests(loaded, 40, 1.0, top_p=0.9, logprobs=True, top_logprobs=4)
    edited = mixed_requests(loaded, 8, 1.0, repetition_penalty=1.2)
    # Graphs that end at the logits are captured when they are first needed: before the loop is watched.
    list(engine.generate([*requests, *edited]))
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        list(engine.generate(requests))
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    streams: dict[int, int] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            stream = event["args"]["stream"]
            streams[stream] = streams.get(stream, 0) + 1
    # The profiler numbers the default stream 7.
    assert 7 not in streams, streams
    assert len(streams) == 3 and sum(streams.values()) > 500, streams


def test_a_decode_step_of_the_same_rows_sends_nothing(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, mode=EngineMode.async_, block_size=64)
    slots = engine._cuda
    sent: list[int] = []
    launch = slots.launch

    def noted(inputs: Any) -> Any:
        before = slots.num_sent
        launched = launch(inputs)
        sent.append(slots.num_sent - before)
        return launched

    slots.launch = noted
    list(engine.generate([request(row, [9, row + 5], max_tokens=60, ignore_eos=True) for row in range(6)]))
    assert len(sent) == 60 and sent[0] > 0 and sent[1] > 0
    assert sent[2:] == [0] * 58


def test_all_that_is_drawn_equals_the_cpu_engine_in_float32(model_path: str) -> None:
    """Filters, penalties, alternatives: on a GPU as on the CPU, in float32, but for rounding's rare draws."""
    requests: list[Request] = []
    both = {}
    for device in (Device.cuda, Device.cpu):
        config = ModelConfig(path=model_path, device=device, dtype=Dtype.float32, max_model_len=512)
        loaded = load_model(config, load_tokenizer(config))
        if not requests:
            for number, params in enumerate(
                (
                    {"temperature": 1.0, "top_p": 0.9},
                    {"temperature": 0.7, "top_k": 20, "min_p": 0.02},
                    {"temperature": 0.0, "repetition_penalty": 1.2},
                    {"temperature": 1.0, "presence_penalty": 0.5, "logit_bias": ((5, 2.0),)},
                )
            ):
                rng = np.random.default_rng(number)
                requests += [
                    request(
                        10 * number + row,
                        rng.integers(3, loaded.vocab_size - 1, 12).tolist(),
                        max_tokens=16,
                        logprobs=True,
                        top_logprobs=5,
                        **params,
                    )
                    for row in range(8)
                ]
        engine = engine_of(loaded, num_topk=5, max_num_seqs=16, num_blocks=200)
        both[device] = {c.request.key: c for c in engine.generate(requests)}
    same = 0
    for key, ours in both[Device.cuda].items():
        theirs = both[Device.cpu][key]
        if ours.token_ids.tolist() == theirs.token_ids.tolist():
            same += 1
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-3)
            np.testing.assert_allclose(ours.topk_logprobs, theirs.topk_logprobs, atol=2e-3)
    print(f"{same} of {len(requests)} rows equal the CPU engine's")
    assert same >= len(requests) - 2


def test_two_jobs_in_one_process_and_changed_weights(model_path: str) -> None:
    """Graphs keep the addresses of the weights: other weights must be seen, and no K/V of old ones reused."""
    config = ModelConfig(path=model_path, device=Device.cuda, dtype=Dtype.bfloat16, max_model_len=512)
    loaded = load_model(config, load_tokenizer(config))
    engine = engine_of(loaded, determinism=Determinism.bitwise)
    requests = mixed_requests(loaded, 40, 0.0)
    first = outcome(engine.generate(requests))
    assert outcome(engine.generate(requests)) == first
    norm = loaded.model.model.norm
    with torch.no_grad():
        # A new tensor in place of the old one: what a graph of before would not see.
        norm.weight = torch.nn.Parameter(-norm.weight.detach().clone(), requires_grad=False)
        changed = outcome(engine.generate(requests))
        assert sum(changed[key] != first[key] for key in first) > 30
        norm.weight = torch.nn.Parameter(-norm.weight.detach().clone(), requires_grad=False)
    assert outcome(engine.generate(requests)) == first


@pytest.mark.parametrize("mode", [EngineMode.async_, EngineMode.sync])
def test_out_of_memory_in_a_step_gives_its_rows_back(loaded: LoadedModel, mode: EngineMode) -> None:
    requests = mixed_requests(loaded, 60, 0.0)
    expected = outcome(engine_of(loaded, determinism=Determinism.bitwise, mode=mode).generate(requests))
    engine = engine_of(loaded, determinism=Determinism.bitwise, mode=mode)
    runner = engine._cuda.runner
    run, calls = runner.run, 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (3, 4, 9):
            raise torch.cuda.OutOfMemoryError("injected")
        return run(*args)

    runner.run = failing
    assert outcome(engine.generate(requests)) == expected
    assert calls > 9


def test_many_rows_of_a_large_vocabulary_stay_within_memory() -> None:
    """1,024 rows x 152k ids with alternatives: what was measured at start holds for the whole run."""
    config = LlamaConfig(
        vocab_size=152_000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    loaded = wrap_model(model, max_model_len=512)
    settings = EngineConfig(max_num_seqs=1024, max_num_batched_tokens=8192, block_size=64)
    engine = Engine(loaded, settings, num_topk=20)
    rng = np.random.default_rng(0)
    requests = [
        request(
            row,
            rng.integers(3, 150_000, int(rng.integers(1, 400))).tolist(),
            max_tokens=24,
            temperature=1.0,
            top_p=0.95,
            # Some through the host's edits, which need the most memory of all.
            repetition_penalty=1.1 if row % 7 == 0 else 1.0,
            logprobs=True,
            top_logprobs=20,
        )
        for row in range(1500)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(len(c.token_ids) for c in engine.generate(requests)) == 1500 * 24
    assert engine.stats.counters.num_retreats == 0
    free, total = torch.cuda.mem_get_info()
    assert (total - free) / total <= settings.gpu_memory_utilization + 0.03
