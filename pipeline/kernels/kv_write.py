"""Writes new keys and values to their pages, both in one launch.

Shapes: T = tokens, H = KV heads, D = head width, N = pages, P = page size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _write_kernel(
    new_keys_ptr: tl.tensor,
    new_values_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    stride_key_token: tl.tensor,
    stride_key_head: tl.tensor,
    stride_value_token: tl.tensor,
    stride_value_head: tl.tensor,
    stride_page: tl.tensor,
    stride_head: tl.tensor,
    stride_position: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    i = tl.arange(0, BLOCK)
    head, d = i // HEAD_DIM, i % HEAD_DIM
    mask = (i < NUM_HEADS * HEAD_DIM) & (slot >= 0)
    # Both loads are in flight before the first store waits.
    key = tl.load(new_keys_ptr + token * stride_key_token + head * stride_key_head + d, mask=mask)
    value = tl.load(new_values_ptr + token * stride_value_token + head * stride_value_head + d, mask=mask)
    target = (slot // PAGE) * stride_page + (slot % PAGE) * stride_position + head * stride_head + d
    tl.store(keys_ptr + target, key, mask=mask)
    tl.store(values_ptr + target, value, mask=mask)


def write_kv(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    num_warps: int = 4,
) -> None:
    """new_keys, new_values [T, H, D] -> keys, values [N, H, P, D], at slot_mapping int64 [T].

    A slot is page * P + offset. The new ones may be slices of a wider tensor; only their last dimension must
    be contiguous. A negative slot writes nothing: the padding tokens of a captured batch have no position.
    """
    num_tokens, num_heads, head_dim = new_keys.shape
    assert new_keys.stride(2) == new_values.stride(2) == keys.stride(3) == 1
    assert keys.stride() == values.stride() and keys.shape == values.shape
    assert new_values.shape == new_keys.shape and (num_heads, head_dim) == (keys.shape[1], keys.shape[3])
    assert slot_mapping.shape == (num_tokens,) and slot_mapping.is_contiguous()
    if num_tokens == 0:
        return
    _write_kernel[(num_tokens,)](
        new_keys,
        new_values,
        keys,
        values,
        slot_mapping,
        new_keys.stride(0),
        new_keys.stride(1),
        new_values.stride(0),
        new_values.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE=keys.shape[2],
        BLOCK=triton.next_power_of_2(num_heads * head_dim),
        num_warps=num_warps,
    )
