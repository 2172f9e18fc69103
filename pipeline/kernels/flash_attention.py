"""FlashAttention-3 for prompt chunks over our paged cache, where a package of it can be imported.

Its pages lie [N, P, H, D]; ours, [N, H, P, D], are handed over as a transposed view, because it takes any
strides but the last. Builds differ: the wheel `fa3-fwd` 0.0.3 knows no sliding window, no float16, and only
pages that hold whole tiles (a multiple of 128 positions at 128 wide, none at 256). So nothing is assumed of
a build: `why_not_flash` calls it once and compares with float64. It knows no sinks.

Shapes: T = tokens, R = rows, Hq = query heads, H = KV heads, D = head width, N = pages, P = page size,
B = pages per row.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch

_PACKAGES = ("flash_attn_interface", "fa3_fwd_interface")
# Builds without a kernel for split pages take whole ones only where chunks may be longer than a tile. A bound
# on their length, it costs nothing if it is too high: the kernel reads the real ones from the device.
_LONGER_THAN_A_TILE = 256
_HOPPER = 9
_WIDEST_HEAD = 256
# Rounding in bfloat16 is 4e-3 of a value; wrong masks and pages are off by the value.
_TOLERANCE = 2e-2


@cache
def flash_package() -> Any | None:
    """The first FlashAttention-3 module that is installed; None if there is none or it does not load."""
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is not None:
            try:
                return importlib.import_module(name)
            except (ImportError, OSError):  # built for another torch
                continue
    return None


def flash_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """As paged_prefill, with context_lens int32 [R], each row's chunk included, in place of its start:
    query [T, Hq, D] -> [T, Hq, D]; tokens outside query_start_loc are left as the memory was."""
    package = flash_package()
    assert package is not None, "why_not_flash comes first"
    out = package.flash_attn_with_kvcache(
        query,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        cache_seqlens=context_lens,
        page_table=block_tables,
        cu_seqlens_q=query_start_loc,
        max_seqlen_q=max(len(query), _LONGER_THAN_A_TILE),
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap or 0.0,
        num_splits=1,
    )
    return out[0] if isinstance(out, tuple) else out


def why_not_flash(
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> str | None:
    """What stands against FlashAttention-3 for such layers; None if a small call of it came out right."""
    if flash_package() is None:
        return f"none of {', '.join(_PACKAGES)} can be imported (pip install fa3-fwd)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return f"{torch.cuda.get_device_name(device)} is no Hopper GPU"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 and float16, not in {dtype}"
    if head_dim > _WIDEST_HEAD or head_dim % 8:
        return f"heads of {head_dim} are not among its widths"
    try:
        error = _error_of_small_call(
            num_query_heads, num_kv_heads, head_dim, page_size, dtype, device, scale, window, softcap
        )
    except Exception as error_raised:  # a build may refuse in any way at all: that is the answer
        return str(error_raised).splitlines()[0] if str(error_raised) else type(error_raised).__name__
    return None if error <= _TOLERANCE else f"a small call of it is {error:.1%} off float64"


@torch.inference_mode()
def _error_of_small_call(
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> float:
    """Share of the right result's norm. Two chunks, one behind a page and a window, pages in disorder."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    query_lens, contexts = [5, 7], [5, (window or 0) + page_size + 9]
    num_pages = [-(-length // page_size) for length in contexts]
    pages = torch.arange(1, 1 + sum(num_pages), dtype=torch.int32).flip(0).split(num_pages)
    tables = torch.zeros((2, max(num_pages)), dtype=torch.int32)
    for row, numbers in enumerate(pages):
        tables[row, : len(numbers)] = numbers
    query = random(sum(query_lens), num_query_heads, head_dim)
    keys, values = (random(1 + sum(num_pages), num_kv_heads, page_size, head_dim) for _ in range(2))
    start_loc = torch.tensor([0, query_lens[0], sum(query_lens)], dtype=torch.int32, device=device)
    lens = torch.tensor(contexts, dtype=torch.int32, device=device)
    out = flash_prefill(
        query, keys, values, tables.to(device), start_loc, lens, scale=scale, window=window, softcap=softcap
    )
    right = []
    for chunk, numbers, context in zip(query.split(query_lens), pages, contexts, strict=True):
        held = numbers.long().to(device)
        right.append(_by_definition(chunk, keys[held], values[held], context, scale, window, softcap))
    expected = torch.cat(right)
    return float((out.double() - expected).norm() / expected.norm())


def _by_definition(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    context: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One row in float64: query [L, Hq, D], its last tokens; keys and values [B, H, P, D] -> [L, Hq, D]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (
        t.transpose(1, 2).flatten(0, 1)[:context].double().repeat_interleave(group, 1) for t in (keys, values)
    )
    scores = torch.einsum("lhd,phd->hlp", query.double(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(context, device=query.device)
    distance = position[-len(query) :, None] - position[None, :]
    hidden = (distance < 0) | (distance >= (window or context))
    return torch.einsum("hlp,phd->lhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
