"""Compiled models: one graph for all sizes, the uncompiled one's logits, a reason where there is none."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from typing import Any

import numpy as np
import pytest
import torch
from fakes import random_model
from models.families import LONGEST_ROW, RUN, family
from torch._dynamo.testing import CompileCounterWithBackend

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)
_triton = sys.modules.get("triton")
if not torch.cuda.is_available() and not (_triton and _triton.knobs.runtime.interpret):
    importlib.import_module("kernels.conftest")

from pipeline.models import forward  # noqa: E402
from pipeline.models.attention import CpuAttentionContext, GroupContext  # noqa: E402
from pipeline.models.compiled import CompileRefused, compile_forward, compile_step, small_step  # noqa: E402
from pipeline.models.cpu_attention import plan_tensors  # noqa: E402
from pipeline.models.cuda_attention import CudaAttentionContext  # noqa: E402
from pipeline.models.forward import make_forward  # noqa: E402
from pipeline.models.layers import layers_by_window  # noqa: E402
from pipeline.models.load import LoadedModel, wrap_model  # noqa: E402

BLOCK_SIZE = 32
# Each of these has something of its own: softcaps and windows, experts, sinks.
QUICK = ("Gemma 2", "Qwen3-MoE", "GPT-OSS")
RUNS_HERE = [one.name for one in RUN if one.runs_here]


def load(name: str) -> LoadedModel:
    one = family(name)
    return wrap_model(random_model(one.config(), one.seed), max_model_len=one.max_model_len)


def cpu_step(
    loaded: LoadedModel, length: int
) -> tuple[torch.Tensor, torch.Tensor, CpuAttentionContext, torch.Tensor]:
    """Two prompts of this length through the CPU's operator, which the compiler treats as the GPU's."""
    a = loaded.architecture
    tables = 1 + np.arange(2 * LONGEST_ROW // BLOCK_SIZE, dtype=np.int32).reshape(2, -1)
    size = (tables.size + 1, a.num_kv_heads, BLOCK_SIZE, a.head_dim)
    keys, values = ([torch.zeros(size) for _ in range(a.num_layers)] for _ in range(2))
    positions = np.tile(np.arange(length), 2)
    row = np.repeat(np.arange(2), length)
    slots = tables[row, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    groups = {
        window: GroupContext(
            torch.from_numpy(slots),
            plan_tensors(
                np.zeros(2, np.int32),
                np.full(2, length, np.int32),
                tables,
                block_size=BLOCK_SIZE,
                group_size=a.num_heads // a.num_kv_heads,
                window=window,
            ),
        )
        for window in layers_by_window(loaded)
    }
    ids = torch.arange(2 * length) * 7 % loaded.vocab_size
    ends = torch.tensor([length - 1, 2 * length - 1])
    return ids, torch.from_numpy(positions), CpuAttentionContext(keys, values, groups), ends


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.large) for name in RUNS_HERE]
)
@torch.inference_mode()
def test_a_family_is_one_graph(name: str) -> None:
    loaded = load(name)
    step = compile_step(loaded.model, "eager")
    expected = forward.transformers_step(loaded.model)(*cpu_step(loaded, 21))  # type: ignore[arg-type]
    torch.testing.assert_close(step(*cpu_step(loaded, 21)), expected)


def test_one_compilation_for_all_sizes() -> None:
    """One token, one row, as many tokens as rows, caches of any size: one graph."""
    loaded = load("Gemma 2")
    eager = forward.transformers_step(loaded.model)
    counter = CompileCounterWithBackend("eager")
    step = compile_forward(loaded, BLOCK_SIZE, eager, {}, counter)
    for lens in ([1], [2], [1, 1], [16], [1, 3], [1] * 16, [1, 1, 20]):
        got_step, expected_step = (small_step(loaded, BLOCK_SIZE, lens, {}) for _ in range(2))
        with torch.inference_mode():
            expected = eager(*expected_step)
            # Some inputs are made in inference mode, some outside.
            got = step(got_step[0].clone(), *got_step[1:3], got_step[3].clone())
        torch.testing.assert_close(got, expected, msg=lambda text, lens=lens: f"{lens}: {text}")
        for written, right in zip(got_step[2].keys, expected_step[2].keys, strict=True):
            torch.testing.assert_close(written, right)
    assert counter.frame_count == 1


@torch.inference_mode()
def test_models_have_compilations_of_their_own() -> None:
    """More models in one process than the compiler compiles one function for."""
    counter = CompileCounterWithBackend("eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):
            compile_step(load("Llama").model, counter)(*cpu_step(load("Llama"), 5))
    assert counter.frame_count == 3


class Unwilling:
    """A backend that cannot, or that compiles something else."""

    def __init__(self, wrong: bool) -> None:
        self.wrong = wrong

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        if not self.wrong:
            raise RuntimeError("no such instruction\nand more")
        return lambda *arguments: tuple(
            out + 1 if isinstance(out, torch.Tensor) and out.is_floating_point() else out
            for out in graph.forward(*arguments)
        )


@pytest.mark.parametrize(
    ("wrong", "said"), [(False, "^RuntimeError: no such instruction$"), (True, "% off the uncompiled")]
)
def test_refused_with_the_reason(wrong: bool, said: str) -> None:
    loaded = load("Phi-3")
    with pytest.raises(CompileRefused, match=said):
        compile_forward(loaded, BLOCK_SIZE, forward.transformers_step(loaded.model), {}, Unwilling(wrong))


class TestMakeForward:
    def refuse(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refused(*_: Any) -> None:
            raise CompileRefused("no compiler here")

        monkeypatch.setattr(forward, "compile_forward", refused)

    def test_falls_back_and_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuse(monkeypatch)
        loaded = load("Phi-3")
        step, words = make_forward(loaded, compiled=None, block_size=BLOCK_SIZE)
        assert words.startswith("transformers' modules (not fused: Phi3ForCausalLM is none of ")
        assert words.endswith("; not compiled: no compiler here)")
        with torch.inference_mode():
            assert step(*small_step(loaded, BLOCK_SIZE, [3], {})).shape == (1, loaded.vocab_size)

    def test_demanded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuse(monkeypatch)
        with pytest.raises(ValueError, match=r"engine\.compile=true: .*no compiler here; use "):
            make_forward(load("Phi-3"), compiled=True, block_size=BLOCK_SIZE)

    def test_fused_models_are_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuse(monkeypatch)
        assert make_forward(load("Llama"), compiled=True, block_size=BLOCK_SIZE)[1] == "fused"


@pytest.mark.large
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
def test_inductor_computes_the_same() -> None:
    """The real compiler: the cache is written in place and nothing is reordered around the operator."""
    loaded = load("Gemma 2")
    eager = forward.transformers_step(loaded.model)
    step = compile_forward(loaded, BLOCK_SIZE, eager, {})
    kept = small_step(loaded, BLOCK_SIZE, [1, 1, 5], {})
    right: tuple[Any, Any, CudaAttentionContext, Any] = small_step(loaded, BLOCK_SIZE, [1, 1, 5], {})
    with torch.inference_mode():
        torch.testing.assert_close(step(*kept), eager(*right), atol=1e-4, rtol=1e-4)
    for layer in range(loaded.architecture.num_layers):
        torch.testing.assert_close(kept[2].values[layer], right[2].values[layer])
        assert kept[2].values[layer].abs().max() > 0
