"""Attention of a step: decoding rows and prompt chunks side by side, and either kernel for what it takes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import random_model
from models.families import family

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)
_triton = sys.modules.get("triton")
if not torch.cuda.is_available() and not (_triton and _triton.knobs.runtime.interpret):
    importlib.import_module("kernels.conftest")

from pipeline.kernels.paged_prefill import paged_prefill  # noqa: E402
from pipeline.models import cuda_attention  # noqa: E402
from pipeline.models.attention import AttentionOptions  # noqa: E402
from pipeline.models.compiled import small_step  # noqa: E402
from pipeline.models.cuda_attention import CudaAttentionContext, PromptKernel  # noqa: E402
from pipeline.models.load import wrap_model  # noqa: E402

OPTIONS = AttentionOptions(0.3)


def step(query_lens: list[int]) -> tuple[CudaAttentionContext, torch.Tensor]:
    """Rows of so many new tokens behind four that are in the cache, and their queries."""
    loaded = wrap_model(random_model(family("Llama").config()))
    context = small_step(loaded, 16, query_lens, {})[2]
    context = replace(context, starts=context.starts + 4, context_lens=context.context_lens + 4)
    context.plan()
    torch.manual_seed(0)
    for cached in (context.keys[0], context.values[0]):
        cached.normal_()
    return context, torch.randn(sum(query_lens), loaded.architecture.num_heads, loaded.architecture.head_dim)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [1, 1, 3, 5]])
def test_every_row_as_a_prompt_chunk(query_lens: list[int]) -> None:
    """num_decode = 0 computes the same rows without the split-KV kernel, whose workspace it leaves alone."""
    context, query = step(query_lens)
    expected = context.attend_written(0, query, OPTIONS)
    group = replace(context.groups[None], workspace=None)  # type: ignore[arg-type]
    chunks = replace(context, num_decode=0, groups={None: group})
    chunks.plan()
    torch.testing.assert_close(chunks.attend_written(0, query, OPTIONS), expected)


def test_flash_attention_takes_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result and the decoding rows' come together in one tensor."""
    context, query = step([1, 1, 3, 5])
    calls: list[int] = []

    def flash(
        query: torch.Tensor, *cache: torch.Tensor, scale: float, window: Any, softcap: Any
    ) -> torch.Tensor:
        *paged, start_loc, lens = cache
        calls.append(len(lens))
        out = torch.full_like(query, torch.nan)
        return paged_prefill(query, *paged, start_loc, lens - start_loc.diff(), scale=scale, out=out)

    monkeypatch.setattr(cuda_attention, "flash_prefill", flash)
    expected = context.attend_written(0, query, OPTIONS)
    assert calls == []
    by_flash = replace(context, prompt_kernels={None: PromptKernel.flash_attention_3})
    torch.testing.assert_close(by_flash.attend_written(0, query, OPTIONS), expected)
    assert calls == [2]
    # Decoding rows alone never ask for it.
    alone, query = step([1, 1])
    replace(alone, prompt_kernels=by_flash.prompt_kernels).attend_written(0, query, OPTIONS)
    assert calls == [2]
