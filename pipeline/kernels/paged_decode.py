"""Attention of one query per row over the paged cache: split over the context, combined in the same launch.

A program takes a work item (decode_plan) and a KV head; the query heads of that KV head are its matrix rows,
padded to 16 for the tensor cores, so that keys and values are read once for the whole group. A row of one
item is finished by its program. Otherwise programs leave their sums in the workspace and count themselves;
the last to arrive combines them in the order of the splits, whichever program it is. A second kernel for
that would cost a launch and a wave of programs in every layer, some microseconds each, and save nothing:
the sums lie in L2 either way, and here the combining of one row hides behind the reading of others.

Shapes: R = rows, Hq = query heads, H = KV heads, D = head width, N = pages, P = page size, B = pages per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pipeline.kernels.decode_plan import (
    ITEM_FIELDS,
    ITEM_FIRST,
    ITEM_NUM_SPLITS,
    ITEM_ROW,
    ITEM_SPLIT,
    ITEM_STOP,
    DecodeWorkspace,
    allocate_workspace,
    plan_decode,
)
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
def _combine(
    partials_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    first_item: tl.tensor,
    num_splits: tl.tensor,
    heads: tl.tensor,
    d: tl.tensor,
    row_mask: tl.tensor,
    mask: tl.tensor,
    NUM_QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """The sums of a row's splits, in their order -> (accumulator [M, D], maximum [M], total [M])."""
    accumulator = tl.zeros([ROWS, COLUMNS], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # Unrolled so that the loads of four splits are on their way together.
    for split in tl.range(0, num_splits, loop_unroll_factor=4):
        at = (first_item + split).to(tl.int64) * NUM_QUERY_HEADS + heads
        # Other SMs wrote these: not from this SM's own cache.
        part = tl.load(
            partials_ptr + at[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        part_maximum = tl.load(maxima_ptr + at, mask=row_mask, other=0.0, cache_modifier=".cg")
        part_total = tl.load(totals_ptr + at, mask=row_mask, other=0.0, cache_modifier=".cg")
        new_maximum = tl.maximum(maximum, part_maximum)
        correction = tl.exp2(maximum - new_maximum)
        weight = tl.exp2(part_maximum - new_maximum)
        accumulator = accumulator * correction[:, None] + part * weight[:, None]
        total = total * correction + part_total * weight
        maximum = new_maximum
    return accumulator, maximum, total


@triton.jit
def _decode_kernel(
    query_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    table_ptr: tl.tensor,
    items_ptr: tl.tensor,
    num_items_ptr: tl.tensor,
    partials_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    sinks_ptr: tl.tensor,
    out_ptr: tl.tensor,
    score_scale: tl.tensor,
    softcap: tl.tensor,
    stride_query_row: tl.tensor,
    stride_query_head: tl.tensor,
    stride_page: tl.tensor,
    stride_head: tl.tensor,
    stride_position: tl.tensor,
    stride_table: tl.tensor,
    stride_out_row: tl.tensor,
    stride_out_head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    g = tl.arange(0, GROUP_PADDED)
    d = tl.arange(0, HEAD_PADDED)
    n = tl.arange(0, BLOCK_N)
    row_mask = g < GROUP
    mask = row_mask[:, None] & (d < HEAD_DIM)[None, :]
    num_tasks = tl.load(num_items_ptr) * NUM_KV_HEADS
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        # Neighbouring programs read the heads of one page, which lie beside each other in memory.
        item = task // NUM_KV_HEADS
        head = task % NUM_KV_HEADS
        row = tl.load(items_ptr + item * ITEM_FIELDS + ITEM_ROW).to(tl.int64)
        first = tl.load(items_ptr + item * ITEM_FIELDS + ITEM_FIRST)
        stop = tl.load(items_ptr + item * ITEM_FIELDS + ITEM_STOP)
        split = tl.load(items_ptr + item * ITEM_FIELDS + ITEM_SPLIT)
        num_splits = tl.load(items_ptr + item * ITEM_FIELDS + ITEM_NUM_SPLITS)
        heads = head * GROUP + g
        query_at = row * stride_query_row + heads[:, None] * stride_query_head + d[None, :]
        query = tl.load(query_ptr + query_at, mask=mask, other=0.0).to(DOT_TYPE)
        head_keys = keys_ptr + head.to(tl.int64) * stride_head
        head_values = values_ptr + head.to(tl.int64) * stride_head

        accumulator = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
        maximum = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PADDED], tl.float32)
        for start in range(first // BLOCK_N * BLOCK_N, stop, BLOCK_N):
            visible = (start + n >= first) & (start + n < stop)
            offsets = tile_offsets(
                table_ptr + row * stride_table, start, stop, stride_page, stride_position, PAGE, BLOCK_N
            )
            at = offsets[:, None] + d[None, :]
            tile_mask = visible[:, None] & (d < HEAD_DIM)[None, :]
            keys = tl.load(head_keys + at, mask=tile_mask, other=0.0).to(DOT_TYPE)
            scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
            if HAS_SOFTCAP:
                scores = softcapped(scores, score_scale, softcap)
            scores = tl.where(visible[None, :], scores, float("-inf"))
            # What is hidden has weight 0, but 0 x NaN of an unwritten position is NaN: loaded as 0.
            values = tl.load(head_values + at, mask=tile_mask, other=0.0)
            accumulator, maximum, total = online_softmax(
                scores,
                1.0 if HAS_SOFTCAP else score_scale,
                values,
                accumulator,
                maximum,
                total,
                DOT_TYPE,
                PRECISION,
                MAY_BE_EMPTY=False,
            )

        out_at = out_ptr + row * stride_out_row + heads[:, None] * stride_out_head + d[None, :]
        if num_splits == 1:
            result = normalised(accumulator, maximum, total, sinks_ptr, heads, row_mask, HAS_SINKS)
            tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            at = item.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
            tl.store(partials_ptr + at[:, None] * HEAD_DIM + d[None, :], accumulator, mask=mask)
            tl.store(maxima_ptr + at, maximum, mask=row_mask)
            tl.store(totals_ptr + at, total, mask=row_mask)
            # All threads' stores come before the one thread's release, and its acquire before all loads.
            tl.debug_barrier()
            arrival = arrivals_ptr + row * NUM_KV_HEADS + head
            before = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
            if before == num_splits - 1:
                tl.debug_barrier()
                accumulator, maximum, total = _combine(
                    partials_ptr,
                    maxima_ptr,
                    totals_ptr,
                    item - split,
                    num_splits,
                    heads,
                    d,
                    row_mask,
                    mask,
                    NUM_KV_HEADS * GROUP,
                    HEAD_DIM,
                    GROUP_PADDED,
                    HEAD_PADDED,
                )
                result = normalised(accumulator, maximum, total, sinks_ptr, heads, row_mask, HAS_SINKS)
                tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=mask)
                # Nobody else arrives at this counter before the next launch.
                tl.store(arrival, 0)


def paged_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    planned: bool = False,
    bitwise: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [R, Hq, D], keys and values [N, H, P, D], block_tables int32 [R, B], context_lens int32 [R]
    (the token just written included), sinks [Hq] -> [R, Hq, D]; zeros for rows of length 0.

    With a workspace and `out` nothing is allocated. planned: plan_decode has been called on the workspace
    with these lengths and this window, as an engine does once for all layers. bitwise: for the workspace
    made here.
    """
    check_cache(query, keys, values)
    num_rows, num_query_heads, head_dim = query.shape
    _, num_kv_heads, page_size, _ = keys.shape
    assert block_tables.shape[0] == context_lens.shape[0] == num_rows and block_tables.stride(1) == 1
    out = torch.empty_like(query) if out is None else out
    if num_rows == 0:
        return out
    if workspace is None:
        assert not planned
        workspace = allocate_workspace(
            num_rows,
            num_query_heads,
            num_kv_heads,
            head_dim,
            max_context=block_tables.shape[1] * page_size,
            page_size=page_size,
            dtype=query.dtype,
            device=query.device,
            bitwise=bitwise,
        )
    assert workspace.partials.shape[1:] == (num_query_heads, head_dim)
    if not planned:
        plan_decode(context_lens, workspace, window)
    group = num_query_heads // num_kv_heads
    score_scale, base2_softcap = score_factors(scale, softcap)
    _decode_kernel[(workspace.num_programs(num_rows),)](
        query,
        keys,
        values,
        block_tables,
        workspace.items,
        workspace.num_items,
        workspace.partials,
        workspace.maxima,
        workspace.totals,
        workspace.arrivals,
        query if sinks is None else sinks,
        out,
        score_scale,
        base2_softcap,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_PADDED=max(16, triton.next_power_of_2(head_dim)),
        PAGE=page_size,
        BLOCK_N=workspace.launch.block_n,
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None,
        num_warps=workspace.launch.num_warps,
        num_stages=workspace.launch.num_stages,
        **dot_settings(query.dtype),
    )
    return out
