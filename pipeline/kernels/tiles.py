"""What decode and prefill share inside a kernel: where a tile lies in the pages, and the online softmax.

Scores are kept in base 2 (log2(e) is folded into the scale), because exp2 is one instruction. Tiles begin
at multiples of BLOCK_N counted from position 0, never from a row's or a chunk's own beginning: so the order
in which a query's sums are formed depends on its position alone.

Shapes: M = rows of a tile (queries x query heads of one KV head), N = positions of a tile, D = head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit
def tile_offsets(
    table_ptr: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    stride_page: tl.tensor,
    stride_position: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Where positions start.. lie within one head's cache -> int64 [N], in elements.

    Entries of the block table at or beyond `stop` are not read.
    """
    n = tl.arange(0, BLOCK_N)
    if PAGE % BLOCK_N == 0:
        # The tile lies within one page: its number is a scalar and the addresses are one run.
        page = tl.load(table_ptr + start // PAGE).to(tl.int64)
        offsets = page * stride_page + (start % PAGE + n).to(tl.int64) * stride_position
    else:
        positions = start + n
        pages = tl.load(table_ptr + positions // PAGE, mask=positions < stop, other=0).to(tl.int64)
        offsets = pages * stride_page + (positions % PAGE).to(tl.int64) * stride_position
    return offsets


@triton.jit
def softcapped(scores: tl.tensor, score_scale: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """softcap * tanh(score_scale * scores / 2), with tanh from exp2; exact at both ends of the range."""
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * score_scale) + 1.0))


@triton.jit
def online_softmax(
    scores: tl.tensor,
    score_scale: tl.tensor,
    values: tl.tensor,
    accumulator: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_BE_EMPTY: tl.constexpr,
) -> tl.tensor:
    """Takes scores [M, N], -inf where hidden, and values [N, D] into accumulator [M, D], maximum, total [M].

    The scale (> 0) is applied here and not before, so that scaling and subtracting the maximum are one
    fused multiply-add. MAY_BE_EMPTY: a row may see nothing of this tile, and nothing so far.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * score_scale)
    # -inf minus -inf is not a number.
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MAY_BE_EMPTY else new_maximum
    weights = tl.exp2(scores * score_scale - reference[:, None])
    correction = tl.exp2(maximum - reference)
    total = total * correction + tl.sum(weights, 1)
    accumulator = tl.dot(
        weights.to(values.dtype).to(DOT_TYPE),
        values.to(DOT_TYPE),
        accumulator * correction[:, None],
        input_precision=PRECISION,
    )
    return accumulator, new_maximum, total


@triton.jit
def normalised(
    accumulator: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    sinks_ptr: tl.tensor,
    heads: tl.tensor,
    valid: tl.tensor,
    HAS_SINKS: tl.constexpr,
) -> tl.tensor:
    """The softmax-weighted mean [M, D]; a sink is a logit that takes weight and has no value."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads, mask=valid, other=0.0).to(tl.float32) * LOG2E
        reference = tl.maximum(maximum, sink)
        correction = tl.exp2(maximum - reference)
        accumulator = accumulator * correction[:, None]
        total = total * correction + tl.exp2(sink - reference)
    # A row that saw nothing (padding) has nothing accumulated: 0 / 1.
    return accumulator / tl.where(total == 0.0, 1.0, total)[:, None]


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(score_scale, softcap) in base 2, as the kernels take them; the second is 1 when there is no cap."""
    assert scale > 0, scale
    if softcap is None:
        return scale * LOG2E.value, 1.0
    return 2 * LOG2E.value * scale / softcap, softcap * LOG2E.value


def dot_settings(dtype: torch.dtype) -> dict[str, Any]:
    """In what type and precision the products are formed.

    float32 becomes three tf32 products, which keep its precision and use the tensor cores. Triton's
    interpreter multiplies bfloat16 as if its bits were integers; there the exact product of the same values
    is formed in float32.
    """
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    dot_type = tl.float32 if triton.knobs.runtime.interpret else types[dtype]
    return {"DOT_TYPE": dot_type, "PRECISION": "tf32x3"}


def check_cache(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Our own promises about query [T, Hq, D] and the cache [N, H, P, D]."""
    page_size = keys.shape[2]
    assert keys.shape == values.shape and keys.stride() == values.stride(), (keys.shape, values.shape)
    assert keys.stride(3) == 1 and query.stride(2) == 1, "the head's values must lie beside each other"
    assert query.dtype == keys.dtype == values.dtype, (query.dtype, keys.dtype, values.dtype)
    assert query.shape[1] % keys.shape[1] == 0 and query.shape[2] == keys.shape[3], query.shape
    assert page_size % 16 == 0 and 16 <= page_size <= 256, page_size
