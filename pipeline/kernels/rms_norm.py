"""Adds a residual and takes the RMS norm, in one launch.

Rounds where transformers' eager modules do: the sum is rounded to its type before it is squared, and what is
normalised is rounded before it is multiplied by the weight. What is left between the two is the order in
which the squares are summed, which may turn the last bit of a bfloat16 or float16 about once in ten
thousand values. A row is summed by one program, in an order that depends on its width alone.

Shapes: T = tokens, H = width of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """x in float32, as if it had been stored as dtype and read again."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    new_residual_ptr: tl.tensor,
    stride_x: tl.tensor,
    stride_residual: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < WIDTH
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x + i, mask=mask, other=0.0).to(tl.float32)
    # Asked for before the sum, so that it is there after it.
    weight = tl.load(weight_ptr + i, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * stride_residual + i, mask=mask, other=0.0).to(tl.float32)
        x = rounded(x, dtype)
        tl.store(new_residual_ptr + row * WIDTH + i, x.to(dtype), mask=mask)
    x = rounded(x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps), dtype)
    tl.store(normed_ptr + row * WIDTH + i, (x * weight).to(dtype), mask=mask)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    *,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H], residual [T, H], weight [H] -> (the norm of x + residual [T, H], x + residual [T, H]).

    Without a residual, as before the first layer, the second is x itself.
    """
    num_tokens, width = x.shape
    assert weight.shape == (width,) and weight.dtype == x.dtype and x.stride(1) == weight.stride(0) == 1
    if residual is not None:
        assert residual.shape == x.shape and residual.dtype == x.dtype and residual.stride(1) == 1
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    new_residual = x if residual is None else torch.empty_like(normed)
    if num_tokens == 0:
        return normed, new_residual
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(num_tokens,)](
        x,
        x if residual is None else residual,
        weight,
        normed,
        new_residual,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        num_warps=num_warps or norm_warps(block),
    )
    return normed, new_residual


def norm_warps(block: int) -> int:
    """Sixteen values a thread: two loads of 16 bytes in half types. To be decided by measurement."""
    return max(1, min(16, block // 512))
