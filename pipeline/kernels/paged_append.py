"""Writes the one new key and value of every row behind what the row has in its pages, in one launch.

For a caller whose step holds lengths and block tables but no slots: transformers' continuous batching.

Shapes: R = rows, H = KV heads, D = head width, N = pages, P = page size, B = pages per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _append_kernel(
    new_keys_ptr: tl.tensor,
    new_values_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    past_ptr: tl.tensor,
    table_ptr: tl.tensor,
    context_ptr: tl.tensor,
    stride_key_row: tl.tensor,
    stride_key_head: tl.tensor,
    stride_value_row: tl.tensor,
    stride_value_head: tl.tensor,
    stride_page: tl.tensor,
    stride_head: tl.tensor,
    stride_position: tl.tensor,
    stride_table: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    past = tl.load(past_ptr + row)
    # Padding rows have no length or no page: nothing is written for them, and nothing read.
    page = tl.load(table_ptr + row * stride_table + tl.maximum(past, 0) // PAGE).to(tl.int64)
    is_row = (past >= 0) & (page >= 0)
    tl.store(context_ptr + row, tl.where(is_row, past + 1, 0))
    i = tl.arange(0, BLOCK)
    head, d = i // HEAD_DIM, i % HEAD_DIM
    mask = (i < NUM_HEADS * HEAD_DIM) & is_row
    key = tl.load(new_keys_ptr + row * stride_key_row + head * stride_key_head + d, mask=mask)
    value = tl.load(new_values_ptr + row * stride_value_row + head * stride_value_head + d, mask=mask)
    target = page * stride_page + (past % PAGE) * stride_position + head * stride_head + d
    tl.store(keys_ptr + target, key, mask=mask)
    tl.store(values_ptr + target, value, mask=mask)


def append_kv(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    past_lens: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
) -> None:
    """new_keys, new_values [R, H, D] -> keys, values [N, H, P, D], at position past_lens [R] of each row.

    block_tables int32 [R, B]. context_lens int32 [R] becomes past_lens + 1. A row of negative length, or
    whose page is negative, is padding: nothing is written, and its context length becomes 0.
    """
    num_rows, num_heads, head_dim = new_keys.shape
    assert new_keys.stride(2) == new_values.stride(2) == keys.stride(3) == 1
    assert keys.stride() == values.stride() and keys.shape == values.shape
    assert new_values.shape == new_keys.shape and (num_heads, head_dim) == (keys.shape[1], keys.shape[3])
    assert past_lens.shape == context_lens.shape == (num_rows,) and block_tables.shape[0] == num_rows
    assert past_lens.is_contiguous() and context_lens.is_contiguous() and block_tables.stride(1) == 1
    if num_rows == 0:
        return
    _append_kernel[(num_rows,)](
        new_keys,
        new_values,
        keys,
        values,
        past_lens,
        block_tables,
        context_lens,
        new_keys.stride(0),
        new_keys.stride(1),
        new_values.stride(0),
        new_values.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        block_tables.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAGE=keys.shape[2],
        BLOCK=triton.next_power_of_2(num_heads * head_dim),
    )
