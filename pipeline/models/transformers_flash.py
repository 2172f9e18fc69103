"""FlashAttention-3 for transformers' own engine, put together from what can be installed from PyPI.

transformers takes it from the package flash-attn-3, which is not there. The package fa3-fwd brings the
same forward pass without paged memory; steps that only decode then go through this package's own kernels.
Both are offered under the module name that transformers imports. Knows transformers' way to its attention;
refuses to know engines.

Shapes: R = rows, Hq = query heads, H = KV heads, D = head width, N = pages, P = page size, B = pages per row.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from transformers import modeling_flash_attention_utils as flash_utils

from pipeline.models.architecture import Architecture

_OFFICIAL, _FORWARD_ONLY = "flash_attn_interface", "fa3_fwd_interface"
_HOPPER = 9
_HALF_TYPES = (torch.bfloat16, torch.float16)
_PAGE_GRAIN, _LARGEST_PAGE = 16, 256


def can_assemble(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether fa3-fwd is importable and runs here, and the real package is missing."""
    if device.type != "cuda" or dtype not in _HALF_TYPES or _is_official():
        return False
    is_hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
    return is_hopper and importlib.util.find_spec(_FORWARD_ONLY) is not None


def _is_official() -> bool:
    """Whether flash-attn-3 itself is installed, whatever was put in its place here."""
    module = sys.modules.get(_OFFICIAL)
    if isinstance(module, _Assembled):
        return False
    return importlib.util.find_spec(_OFFICIAL) is not None


class _Assembled(ModuleType):
    """Stands where transformers looks for flash-attn-3."""


def assemble(
    architecture: Architecture, *, max_rows: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Offer fa3-fwd and the paged decode kernels to transformers as flash_attention_3.

    For steps of at most max_rows rows, padding included; a later call replaces an earlier one's.
    """
    forward = importlib.import_module(_FORWARD_ONLY)
    module = _Assembled(_OFFICIAL)
    # Those who look for the package want a spec, even one that can load nothing.
    module.__spec__ = ModuleSpec(_OFFICIAL, loader=None)
    decode = None
    if page_size % _PAGE_GRAIN == 0 and page_size <= _LARGEST_PAGE:
        decode = paged_decode_function(
            architecture, max_rows=max_rows, page_size=page_size, dtype=dtype, device=device
        )
    for name, function in (
        ("flash_attn_func", forward.flash_attn_func),
        ("flash_attn_varlen_func", forward.flash_attn_varlen_func),
        ("flash_attn_with_kvcache", decode),
    ):
        setattr(module, name, function)
    sys.modules[_OFFICIAL] = module
    # transformers keeps the functions that it imported last time.
    flash_utils._loaded_implementation = None


def paged_decode_function(
    architecture: Architecture, *, max_rows: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> Callable[..., torch.Tensor]:
    """flash_attn_with_kvcache for one new token a row: three launches, nothing allocated but the result."""
    from pipeline.kernels.decode_plan import allocate_workspace
    from pipeline.kernels.paged_append import append_kv
    from pipeline.kernels.paged_decode import paged_decode

    workspace = allocate_workspace(
        max_rows,
        architecture.num_heads,
        architecture.num_kv_heads,
        architecture.head_dim,
        max_context=architecture.max_position,
        page_size=page_size,
        dtype=dtype,
        device=device,
        bitwise=False,
    )
    context_lens = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """q [R, 1, Hq, D], k_cache, v_cache [N, P, H, D], k, v [R, 1, H, D], cache_seqlens int32 [R],
        block_table int32 [R, B] -> [R, 1, Hq, D]; the parameters' names are flash-attn's."""
        keys, values = k_cache.permute(0, 2, 1, 3), v_cache.permute(0, 2, 1, 3)
        lengths = context_lens[: len(q)]
        append_kv(k.squeeze(1), v.squeeze(1), keys, values, cache_seqlens, block_table, lengths)
        out = paged_decode(
            q.squeeze(1),
            keys,
            values,
            block_table,
            lengths,
            scale=softmax_scale or q.shape[-1] ** -0.5,
            window=window_size[0] + 1 if window_size[0] >= 0 else None,
            softcap=softcap or None,
            workspace=workspace,
        )
        return out.unsqueeze(1)

    return flash_attn_with_kvcache
