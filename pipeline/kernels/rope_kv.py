"""From the fused QKV projection to attention's inputs in one launch: per-head norm, rotation, KV write.

The rotation pairs dimension i with i + D/2 (transformers' rotate_half). Cosines and sines are made once per
step for all layers (`rotary_tables`). All is rounded where transformers' eager modules do, so that without
norms half types give eager's very bits for the same cosines (with norms: see rms_norm.py); float32 differs in
its last bit, since a product and a sum become one operation. Each token is computed on its own.

Shapes: T = tokens, Hq = query heads, H = KV heads, D = head width, N = pages, P = page size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeline.kernels.rms_norm import rounded


@triton.jit
def _rotary_kernel(
    positions_ptr: tl.tensor,
    frequencies_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    scaling: tl.tensor,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF_PADDED)
    position = tl.load(positions_ptr + token).to(tl.float32)
    angle = position * tl.load(frequencies_ptr + d, mask=d < HALF, other=0.0)
    dtype: tl.constexpr = cos_ptr.dtype.element_ty
    tl.store(cos_ptr + token * HALF + d, (tl.cos(angle) * scaling).to(dtype), mask=d < HALF)
    tl.store(sin_ptr + token * HALF + d, (tl.sin(angle) * scaling).to(dtype), mask=d < HALF)


def rotary_tables(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [T] of any integer type, inv_freq float32 [D/2] -> cos, sin [T, D/2] of dtype, scaled."""
    num_tokens, half = positions.shape[0], inv_freq.shape[0]
    assert inv_freq.dtype == torch.float32 and inv_freq.is_contiguous() and positions.is_contiguous()
    cos, sin = (torch.empty(num_tokens, half, dtype=dtype, device=positions.device) for _ in range(2))
    if num_tokens:
        _rotary_kernel[(num_tokens,)](
            positions,
            inv_freq,
            cos,
            sin,
            scaling,
            HALF=half,
            HALF_PADDED=triton.next_power_of_2(half),
            num_warps=1,
        )
    return cos, sin


@triton.jit
def _rope_kv_kernel(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    query_norm_ptr: tl.tensor,
    key_norm_ptr: tl.tensor,
    query_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    eps: tl.tensor,
    stride_token: tl.tensor,
    stride_page: tl.tensor,
    stride_head: tl.tensor,
    stride_position: tl.tensor,
    NUM_QUERY_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    # Cosines and sines are loaded once for each head, from the first-level cache: of their own shape, they
    # would be laid out otherwise and pass through shared memory.
    d = tl.broadcast_to(tl.arange(0, HALF_PADDED)[None, :], [HEADS, HALF_PADDED])
    # Heads of query, key and value lie one after the other; a program may hold some of each.
    is_query = head < NUM_QUERY_HEADS
    is_value = head >= NUM_QUERY_HEADS + NUM_KV_HEADS
    is_key = (head >= NUM_QUERY_HEADS) & (head < NUM_QUERY_HEADS + NUM_KV_HEADS)
    mask = (head < NUM_QUERY_HEADS + 2 * NUM_KV_HEADS) & (d < HALF)
    dtype: tl.constexpr = query_ptr.dtype.element_ty

    at = qkv_ptr + token * stride_token + head * (2 * HALF) + d
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
    turned_first, turned_second = first, second
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        scale = tl.rsqrt(squares / (2 * HALF) + eps)
        weight_at = tl.where(is_query, query_norm_ptr + d, key_norm_ptr + d)
        weight_first = tl.load(weight_at, mask=mask, other=0.0).to(tl.float32)
        weight_second = tl.load(weight_at + HALF, mask=mask, other=0.0).to(tl.float32)
        turned_first = rounded(rounded(first * scale, dtype) * weight_first, dtype)
        turned_second = rounded(rounded(second * scale, dtype) * weight_second, dtype)
    # Eager rounds each product, and then their sum.
    rotated_first = rounded(turned_first * cos, dtype) + rounded(-turned_second * sin, dtype)
    rotated_second = rounded(turned_second * cos, dtype) + rounded(turned_first * sin, dtype)

    query_at = query_ptr + (token * NUM_QUERY_HEADS + head) * (2 * HALF) + d
    tl.store(query_at, rotated_first.to(dtype), mask=mask & is_query)
    tl.store(query_at + HALF, rotated_second.to(dtype), mask=mask & is_query)
    written = mask & (slot >= 0)
    page_at = (slot // PAGE) * stride_page + (slot % PAGE) * stride_position + d
    kept: tl.constexpr = keys_ptr.dtype.element_ty
    key_at = keys_ptr + page_at + (head - NUM_QUERY_HEADS) * stride_head
    tl.store(key_at, rotated_first.to(dtype).to(kept), mask=written & is_key)
    tl.store(key_at + HALF, rotated_second.to(dtype).to(kept), mask=written & is_key)
    value_at = values_ptr + page_at + (head - NUM_QUERY_HEADS - NUM_KV_HEADS) * stride_head
    tl.store(value_at, first.to(kept), mask=written & is_value)
    tl.store(value_at + HALF, second.to(kept), mask=written & is_value)


def rope_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    heads_per_program: int = 8,
    num_warps: int = 2,
) -> torch.Tensor:
    """qkv [T, (Hq+2H)*D], cos and sin [T, D/2] -> query [T, Hq, D], normed and rotated.

    Keys, normed and rotated, and values go to keys, values [N, H, P, D] at slot_mapping int64 [T] (page * P +
    offset). A negative slot writes nothing there: a captured batch's padding has no position. query_norm,
    key_norm [D] and eps: the RMS norms of each head, both or neither.
    """
    num_tokens, (_, num_kv_heads, page_size, head_dim) = qkv.shape[0], keys.shape
    num_heads, half = qkv.shape[1] // head_dim, head_dim // 2
    num_query_heads = num_heads - 2 * num_kv_heads
    assert qkv.shape[1] == num_heads * head_dim and num_query_heads > 0 and head_dim == 2 * half
    assert qkv.stride(1) == keys.stride(3) == 1
    assert keys.shape == values.shape and keys.stride() == values.stride() and keys.dtype == values.dtype
    assert cos.shape == sin.shape == (num_tokens, half) and cos.is_contiguous() and sin.is_contiguous()
    assert cos.dtype == sin.dtype == qkv.dtype
    assert slot_mapping.shape == (num_tokens,) and slot_mapping.is_contiguous()
    assert slot_mapping.dtype == torch.int64
    assert (query_norm is None) == (key_norm is None)
    for norm in (query_norm, key_norm):
        assert norm is None or (norm.shape == (head_dim,) and norm.is_contiguous())
    query = qkv.new_empty(num_tokens, num_query_heads, head_dim)
    if num_tokens == 0:
        return query
    _rope_kv_kernel[(num_tokens, triton.cdiv(num_heads, heads_per_program))](
        qkv,
        cos,
        sin,
        qkv if query_norm is None else query_norm,
        qkv if key_norm is None else key_norm,
        query,
        keys,
        values,
        slot_mapping,
        eps,
        qkv.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        NUM_QUERY_HEADS=num_query_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        HALF_PADDED=triton.next_power_of_2(half),
        PAGE=page_size,
        HEADS=heads_per_program,
        HAS_NORM=query_norm is not None,
        num_warps=num_warps,
    )
    return query
