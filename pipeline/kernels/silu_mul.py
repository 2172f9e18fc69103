"""The gated activation, silu(gate) * up, over the output of one projection that holds both.

Rounds where eager does: silu's result is rounded to its type before it is multiplied. The exponential and the
division are the GPU's fast ones, a few units off in float32's last place, which may turn the last bit of a
bfloat16 or float16 about once in ten thousand values.

Shapes: T = tokens, I = intermediate width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeline.kernels.rms_norm import rounded


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride_token: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row_ptr = gate_up_ptr + token * stride_token
    gate = tl.load(row_ptr + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row_ptr + WIDTH + i, mask=mask, other=0.0).to(tl.float32)
    activated = rounded(gate / (1.0 + tl.exp(-gate)), dtype)
    tl.store(out_ptr + token * WIDTH + i, (activated * up).to(dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor, *, block: int = 1024, num_warps: int = 4) -> torch.Tensor:
    """gate_up [T, 2I], the gate's half first -> [T, I]."""
    num_tokens, both = gate_up.shape
    assert both % 2 == 0 and gate_up.stride(1) == 1
    width = both // 2
    out = gate_up.new_empty(num_tokens, width)
    if num_tokens == 0:
        return out
    block = min(block, triton.next_power_of_2(width))
    _silu_mul_kernel[(num_tokens, triton.cdiv(width, block))](
        gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=block, num_warps=num_warps
    )
    return out
