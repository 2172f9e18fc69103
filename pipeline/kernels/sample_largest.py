"""The likeliest ids of a row and their log-probabilities, likeliest first, the lowest id of equals first.

Chosen from the row's list where it holds them all, else (more equals than the list takes) from the whole row
by the same program. Equal means equal log-probabilities: rounding makes some of different logits.

Shapes: N = rows, K = ids asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pipeline.kernels.sample_scan import load_listed
from pipeline.kernels.sample_tiles import (
    KEY_INFINITE,
    KEY_NONE,
    among_nearest,
    distances,
    key_of,
    load_logits,
    nearest_in_row,
    nearest_in_tile,
    sums_within,
)

# Ids that each id is compared with at once when they are ordered.
RANKED_AT_ONCE: tl.constexpr = tl.constexpr(16)


@triton.jit
def _store_chosen(
    target_ptr: tl.tensor,
    ids: tl.tensor,
    keys: tl.tensor,
    limit: tl.tensor,
    rank_before: tl.tensor,
    room: tl.tensor,
    num_before: tl.tensor,
    num_topk: tl.tensor,
) -> tl.tensor:
    """Append the tile's ids in the set to the num_before stored already; -> how many there are now."""
    chosen = among_nearest(keys, limit, rank_before, room)
    place = num_before + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(target_ptr + place, ids.to(tl.int64), mask=chosen & (place < num_topk))
    return num_before + tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def _load_ids(pointers: tl.tensor, mask: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    return tl.maximum(tl.minimum(tl.load(pointers, mask=mask, other=0), vocab_size - 1), 0)


@triton.jit
def _largest_kernel(
    logits_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    log_total_ptr: tl.tensor,
    reach_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    stride_logits: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    num_chunks: tl.tensor,
    num_topk: tl.tensor,
    TOPK: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> None:
    """ids int64 [N, K], logprobs float32 [N, K]."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits
    ids_ptr += row * num_topk
    highest, shift = tl.load(highest_ptr + row), tl.load(log_total_ptr + row)
    count = tl.program_id(0) * 0 + num_topk
    none = tl.zeros_like(count)
    farthest = none + KEY_INFINITE

    listed, present, complete = load_listed(counts_ptr, listed_ptr, row, num_chunks, CHUNK, SEGMENT, TILE)
    if complete:
        x = tl.load(row_ptr + listed, mask=present, other=-float("inf")).to(tl.float32)
        distance = distances(x, highest, 1.0, shift)
        present = present & (distance <= tl.load(reach_ptr + row) + shift)
        complete = tl.sum(present.to(tl.int32), 0) >= count
        if complete:
            keys = tl.where(present, key_of(distance), KEY_NONE)
            limit = nearest_in_tile(keys, present.to(tl.int32), count, farthest)
            room = count - tl.sum((keys < limit).to(tl.int32), 0)
            _store_chosen(ids_ptr, listed, keys, limit, none, room, none, num_topk)
    if complete == 0:
        limit = nearest_in_row(
            row_ptr, vocab_size, width, highest, 1.0, shift, count, none, farthest, False, BLOCK, WAYS
        )
        below = sums_within(
            row_ptr, vocab_size, width, highest, 1.0, shift, tl.arange(0, 1) + limit - 1, False, BLOCK, 1
        )
        room = count - tl.sum(below, 0).to(tl.int32)
        rank, stored = none, none
        for start in range(0, vocab_size, TILE):
            ids = start + tl.arange(0, TILE)
            keys = key_of(distances(load_logits(row_ptr, ids, vocab_size, width), highest, 1.0, shift))
            keys = tl.where(ids < vocab_size, keys, KEY_NONE)
            stored = _store_chosen(ids_ptr, ids, keys, limit, rank, room, stored, num_topk)
            rank += tl.sum((keys == limit).to(tl.int32), 0)

    # The ids lie in id order; each is put where its rank is, once all have been read. Logits that are not
    # numbers leave places unwritten: what lies there is no id.
    tl.debug_barrier()
    position = tl.arange(0, TOPK)
    mask = position < num_topk
    ids = _load_ids(ids_ptr + position, mask, vocab_size)
    distance = distances(tl.load(row_ptr + ids).to(tl.float32), highest, 1.0, shift)
    rank_of = tl.zeros_like(position)
    for start in range(0, num_topk, RANKED_AT_ONCE):
        other = start + tl.arange(0, RANKED_AT_ONCE)
        other_ids = _load_ids(ids_ptr + other, other < num_topk, vocab_size)
        others = distances(tl.load(row_ptr + other_ids).to(tl.float32), highest, 1.0, shift)[None, :]
        earlier = (others == distance[:, None]) & (other[None, :] < position[:, None])
        ahead = ((others < distance[:, None]) | earlier) & (other < num_topk)[None, :]
        rank_of += tl.sum(ahead.to(tl.int32), 1)
    tl.debug_barrier()
    tl.store(ids_ptr + rank_of, ids, mask=mask)
    tl.store(logprobs_ptr + row * num_topk + rank_of, 0.0 - distance, mask=mask)
