"""Causal attention of chunks of any length over the paged cache, which holds the chunk's own tokens already.

A tile is some queries of one row times the query heads of one KV head, so that keys and values are read
once for the group. Which row a program belongs to is found on the device from query_start_loc: the host needs
no lengths, and at most one program per row has nothing to do. Rows of one token (decode) are right here, but
slow when long: they are not split over the context.

Shapes: T = tokens, R = rows, Hq = query heads, H = KV heads, D = head width, N = pages, P = page size,
B = pages per row, M = rows of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeline.kernels.launch import PrefillLaunch, prefill_launch
from pipeline.kernels.tiles import (
    check_cache,
    dot_settings,
    normalised,
    online_softmax,
    score_factors,
    softcapped,
    tile_offsets,
)


@triton.jit
def _attend(
    accumulator: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    query: tl.tensor,
    positions: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    table_ptr: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    window: tl.tensor,
    score_scale: tl.tensor,
    softcap: tl.tensor,
    stride_page: tl.tensor,
    stride_position: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Takes the tiles of [begin, end) in. Not MASKED: every query sees every position of them.

    [first, stop): the positions that any query of the tile sees; the pages of others may be another row's.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_PADDED)
    for start in range(begin, end, BLOCK_N):
        offsets = tile_offsets(table_ptr, start, stop, stride_page, stride_position, PAGE, BLOCK_N)
        at = offsets[:, None] + d[None, :]
        mask = (d < HEAD_DIM)[None, :]
        if MASKED:
            mask = mask & ((start + n >= first) & (start + n < stop))[:, None]
        keys = tl.load(keys_ptr + at, mask=mask, other=0.0).to(DOT_TYPE)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        if HAS_SOFTCAP:
            scores = softcapped(scores, score_scale, softcap)
        if MASKED:
            distance = positions[:, None] - (start + n)[None, :]
            visible = distance >= 0
            if HAS_WINDOW:
                visible = visible & (distance < window)
            scores = tl.where(visible, scores, float("-inf"))
        values = tl.load(values_ptr + at, mask=mask, other=0.0)
        accumulator, maximum, total = online_softmax(
            scores,
            1.0 if HAS_SOFTCAP else score_scale,
            values,
            accumulator,
            maximum,
            total,
            DOT_TYPE,
            PRECISION,
            MAY_BE_EMPTY=MASKED,
        )
    return accumulator, maximum, total


@triton.jit
def _prefill_kernel(
    query_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    table_ptr: tl.tensor,
    start_loc_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    score_scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    num_rows: tl.tensor,
    stride_query_token: tl.tensor,
    stride_query_head: tl.tensor,
    stride_page: tl.tensor,
    stride_head: tl.tensor,
    stride_position: tl.tensor,
    stride_table: tl.tensor,
    stride_out_token: tl.tensor,
    stride_out_head: tl.tensor,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0)
    # The last tiles of a row see the most: first, so that short ones fill the end.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    # Row r's tiles begin at (tokens before it) // BLOCK_Q + r: room enough whatever the lengths.
    r = tl.arange(0, ROWS)
    base = tl.load(start_loc_ptr)
    loc = tl.load(start_loc_ptr + r, mask=r < num_rows, other=0)
    row = tl.sum(((r < num_rows) & ((loc - base) // BLOCK_Q + r <= tile)).to(tl.int32), 0) - 1
    begin = tl.load(start_loc_ptr + row)
    length = tl.load(start_loc_ptr + row + 1) - begin
    first_query = (tile - (begin - base) // BLOCK_Q - row) * BLOCK_Q
    if first_query >= length:
        return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_PADDED)
    index = first_query + m // GROUP
    heads = head * GROUP + m % GROUP
    row_mask = (m < BLOCK_Q * GROUP) & (index < length)
    mask = row_mask[:, None] & (d < HEAD_DIM)[None, :]
    token = (begin + index).to(tl.int64)
    query_at = token[:, None] * stride_query_token + heads[:, None] * stride_query_head + d[None, :]
    query = tl.load(query_ptr + query_at, mask=mask, other=0.0).to(DOT_TYPE)
    start = tl.load(starts_ptr + row)
    positions = start + index
    first_position = start + first_query
    stop = start + tl.minimum(first_query + BLOCK_Q, length)

    head_keys = keys_ptr + head.to(tl.int64) * stride_head
    head_values = values_ptr + head.to(tl.int64) * stride_head
    table = table_ptr + row.to(tl.int64) * stride_table
    accumulator = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # [whole_from, whole_to): the tiles that all queries see whole. Masks are worked out only around them.
    whole_to = (first_position + 1) // BLOCK_N * BLOCK_N
    whole_from = 0
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(first_position - window + 1, 0)
        begin_at = first // BLOCK_N * BLOCK_N
        whole_from = tl.minimum(tl.cdiv(tl.maximum(stop - window, 0), BLOCK_N) * BLOCK_N, whole_to)
        accumulator, maximum, total = _attend(
            accumulator, maximum, total, query, positions, head_keys, head_values, table,
            begin_at, whole_from, first, stop, window, score_scale, softcap, stride_page, stride_position,
            HEAD_DIM, HEAD_PADDED, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, DOT_TYPE, PRECISION,
        )  # fmt: skip
    accumulator, maximum, total = _attend(
        accumulator, maximum, total, query, positions, head_keys, head_values, table,
        whole_from, whole_to, first, stop, window, score_scale, softcap, stride_page, stride_position,
        HEAD_DIM, HEAD_PADDED, PAGE, BLOCK_N, False, HAS_WINDOW, HAS_SOFTCAP, DOT_TYPE, PRECISION,
    )  # fmt: skip
    accumulator, maximum, total = _attend(
        accumulator, maximum, total, query, positions, head_keys, head_values, table,
        whole_to, stop, first, stop, window, score_scale, softcap, stride_page, stride_position,
        HEAD_DIM, HEAD_PADDED, PAGE, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, DOT_TYPE, PRECISION,
    )  # fmt: skip
    result = normalised(accumulator, maximum, total, sinks_ptr, heads, row_mask, HAS_SINKS)
    out_at = token[:, None] * stride_out_token + heads[:, None] * stride_out_head + d[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=mask)


def paged_prefill(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    starts: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    launch: PrefillLaunch | None = None,
) -> torch.Tensor:
    """query [T, Hq, D], keys and values [N, H, P, D], block_tables int32 [R, B], query_start_loc int32
    [R + 1], starts int32 [R] (the position of each row's first query), sinks [Hq] -> [T, Hq, D].

    window: positions a query sees, itself included. Rows may be empty. query_start_loc need not begin at 0
    nor end at T: tokens outside it are left as `out` has them, and are zero when `out` is made here.
    """
    check_cache(query, keys, values)
    num_tokens, num_query_heads, head_dim = query.shape
    _, num_kv_heads, page_size, _ = keys.shape
    num_rows = starts.shape[0]
    assert block_tables.shape[0] == num_rows == query_start_loc.shape[0] - 1 and block_tables.stride(1) == 1
    assert window is None or window > 0
    out = torch.zeros_like(query) if out is None else out
    if num_tokens == 0 or num_rows == 0:
        return out
    group = num_query_heads // num_kv_heads
    launch = launch or prefill_launch(head_dim * query.dtype.itemsize, page_size, group)
    block_m = max(launch.block_m, triton.next_power_of_2(group))
    score_scale, base2_softcap = score_factors(scale, softcap)
    _prefill_kernel[(num_kv_heads, num_tokens // (block_m // group) + num_rows)](
        query,
        keys,
        values,
        block_tables,
        query_start_loc,
        starts,
        query if sinks is None else sinks,
        out,
        score_scale,
        base2_softcap,
        window or 0,
        num_rows,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        ROWS=triton.next_power_of_2(num_rows),
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_PADDED=max(16, triton.next_power_of_2(head_dim)),
        PAGE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=launch.block_n,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **dot_settings(query.dtype),
    )
    return out
