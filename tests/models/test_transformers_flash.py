"""What transformers imports as FlashAttention-3 is what was put together, and only where it can run."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash_utils

from pipeline.config import Attention
from pipeline.models import transformers_flash
from pipeline.models.architecture import Architecture
from pipeline.models.transformers_flash import assemble, can_assemble

SHAPE = Architecture(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=9, max_position=64)


def forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False
):
    raise AssertionError("never called")


@pytest.fixture
def fa3_fwd(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A package fa3-fwd that is importable and computes nothing."""
    module = types.ModuleType("fa3_fwd_interface")
    module.__spec__ = types.SimpleNamespace(name="fa3_fwd_interface")  # type: ignore[assignment]
    module.flash_attn_func = module.flash_attn_varlen_func = forward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    yield module
    flash_utils._loaded_implementation = None


def loaded_functions() -> list[object]:
    """What transformers takes for a call of flash_attention_3."""
    found = flash_utils.lazy_import_flash_attention(Attention.flash_attention_3.value)[0]
    return [getattr(function, "__wrapped__", function) for function in found[:3]]


def test_transformers_takes_the_assembled_functions(fa3_fwd, monkeypatch):
    decode = lambda q, k_cache, v_cache, k, v, cache_seqlens, block_table: None  # noqa: E731
    monkeypatch.setattr(transformers_flash, "paged_decode_function", lambda *_, **__: decode)
    for page_size, expected in ((256, True), (4, False)):
        assemble(SHAPE, max_rows=4, page_size=page_size, dtype=torch.bfloat16, device=torch.device("cpu"))
        functions = loaded_functions()
        assert forward in functions
        assert (decode in functions) is expected
    # A look for the package does not stumble over what stands in its place.
    assert not transformers_flash._is_official()


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "possible"),
    [
        ("cuda", torch.bfloat16, (9, 0), True),
        ("cuda", torch.float32, (9, 0), False),
        ("cuda", torch.bfloat16, (8, 0), False),
        ("cpu", torch.bfloat16, (9, 0), False),
    ],
)
def test_only_where_its_kernels_run(fa3_fwd, monkeypatch, device, dtype, capability, possible):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert can_assemble(torch.device(device), dtype) is possible


def test_not_without_the_package(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(transformers_flash.importlib.util, "find_spec", lambda _: None)
    assert not can_assemble(torch.device("cuda"), torch.bfloat16)
