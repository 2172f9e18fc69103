"""The two readings of all logits that sampling needs, spread over chunks of rows.

First a chunk's maximum, summed exponentials and the maxima of its groups: any partition of the chunk into
groups of equal size. A row's n-th highest group maximum bounds its n-th highest logit from below, and with
many more groups than n, closely. So a row's list of likeliest ids is known to be long enough before any is
written. The second reading writes it, chunk by chunk, and adds up each chunk's mass for the draw.

Log-probabilities: exponentials of float32, summed as float32 within a chunk and as float64 across chunks; the
logarithm is within about 3e-7 of the exact one.

Shapes: N = rows, C = chunks of a row, G = groups of a chunk, L = ids a chunk may list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pipeline.kernels.sample_tiles import KEY_NONE, distances, load_logits

# The upper half of a float32 at infinity: group maxima are compared by it, which is close enough.
HALF_INFINITE: tl.constexpr = tl.constexpr(0x7F80)


@triton.jit
def _stats_kernel(
    logits_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    first_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    stride_logits: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    RECORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """maxima, sums float32 [N, C]; first int32 [N, C], the maximum's lowest id; groups float32 [N, C, G]."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    target = row * tl.num_programs(0) + chunk
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits_ptr + row * stride_logits, ids, vocab_size, width)
    highest = tl.max(x, 0)
    tl.store(maxima_ptr + target, highest)
    tl.store(first_ptr + target, tl.min(tl.where(x == highest, ids, KEY_NONE), 0))
    if RECORDS:
        # A chunk of nothing but -inf has no distances to its maximum.
        tl.store(sums_ptr + target, tl.sum(tl.exp(x - tl.where(highest == -float("inf"), 0.0, highest)), 0))
    # Any order will do, so that each thread keeps to what it has.
    groups = tl.max(tl.reshape(x, [GROUPS, CHUNK // GROUPS], can_reorder=True), 1)
    tl.store(groups_ptr + target * GROUPS + tl.arange(0, GROUPS), groups)


@triton.jit
def _combine_kernel(
    maxima_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    first_ptr: tl.tensor,
    groups_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    log_total_ptr: tl.tensor,
    best_ptr: tl.tensor,
    reach_ptr: tl.tensor,
    num_chunks: tl.tensor,
    num_topk: tl.tensor,
    vocab_size: tl.tensor,
    RECORDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    LISTED: tl.constexpr,
) -> None:
    """highest, log_total, reach float32 [N], best int32 [N]: per row.

    reach: the unscaled distance up to which ids are listed; negative if none are needed.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    source = row * num_chunks + chunk
    mask = chunk < num_chunks
    maxima = tl.load(maxima_ptr + source, mask=mask, other=-float("inf"))
    highest = tl.max(maxima, 0)
    first = tl.load(first_ptr + source, mask=mask, other=KEY_NONE)
    best = tl.min(tl.where(maxima == highest, first, KEY_NONE), 0)
    tl.store(highest_ptr + row, highest)
    # Logits that are not numbers have no highest; the id stays one of the vocabulary.
    tl.store(best_ptr + row, tl.minimum(best, vocab_size - 1))
    if RECORDS:
        sums = tl.load(sums_ptr + source, mask=mask, other=0.0).to(tl.float64)
        total = tl.sum(sums * tl.exp((maxima - highest).to(tl.float64)), 0)
        tl.store(log_total_ptr + row, tl.log(total).to(tl.float32))

    top_k = tl.load(top_k_ptr + row)
    wanted = tl.where(top_k > 0, tl.where(top_k <= LISTED, top_k, 0), 0).to(tl.int32)
    if (top_k <= 0) & (tl.load(top_p_ptr + row) < 1.0):
        # With as many groups as ids wanted the lowest group would set the bound, far too low.
        wanted = tl.zeros_like(wanted) + tl.minimum(LISTED, tl.cdiv(num_chunks * GROUPS, 4))
    wanted = tl.maximum(tl.where(tl.load(temperature_ptr + row) > 0, wanted, 0), num_topk)
    reach = tl.zeros_like(highest) - 1.0
    if wanted > 0:
        group = tl.arange(0, CHUNKS * GROUPS)
        group_mask = group < num_chunks * GROUPS
        values = tl.load(groups_ptr + row * num_chunks * GROUPS + group, mask=group_mask, other=-float("inf"))
        halves = (highest - values).to(tl.int32, bitcast=True) >> 16
        low = tl.zeros_like(wanted)
        high = low + HALF_INFINITE
        while low < high:
            middle = (low + high) // 2
            enough = tl.sum((halves <= middle).to(tl.int32), 0) >= wanted
            low = tl.where(enough, low, middle + 1)
            high = tl.where(enough, middle, high)
        reach = ((high << 16) | 0xFFFF).to(tl.float32, bitcast=True)
        reach = tl.where(high >= HALF_INFINITE, float("inf"), reach)
    tl.store(reach_ptr + row, reach)


@triton.jit
def _select_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    log_total_ptr: tl.tensor,
    reach_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    stride_logits: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    RECORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """masses float64 [N, C]; counts int32 [N, C], how many ids of the chunk are within reach; listed int16
    [N, C, L], the first L of these, from the chunk's begin."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    target = row * tl.num_programs(0) + chunk
    temperature = tl.load(temperature_ptr + row)
    reach = tl.load(reach_ptr + row)
    if (temperature > 0) | (reach >= 0):
        offsets = tl.arange(0, CHUNK)
        ids = chunk * CHUNK + offsets
        highest = tl.load(highest_ptr + row)
        x = load_logits(logits_ptr + row * stride_logits, ids, vocab_size, width)
        scale = tl.where(temperature > 0, temperature, 1.0)
        distance = distances(x, highest, scale, 0.0)
        if temperature > 0:
            # What other filters leave is not known yet: with them these are the masses before all filters.
            bounded = (tl.load(top_k_ptr + row) <= 0) & (tl.load(top_p_ptr + row) >= 1.0)
            limit = tl.where(bounded, min_p_distance(tl.load(min_p_ptr + row)), float("inf"))
            weights = tl.where(distance <= limit, tl.exp(-distance), 0.0)
            tl.store(masses_ptr + target, tl.sum(weights.to(tl.float64), 0))
        if reach >= 0:
            # Of ids that rounding makes equal all are listed or none, in the draw's order and the records'.
            near = distance <= tl.div_rn(reach, scale)
            if RECORDS:
                shift = tl.load(log_total_ptr + row)
                near |= distances(x, highest, 1.0, shift) <= reach + shift
            near &= ids < vocab_size
            place = tl.cumsum(near.to(tl.int32), 0) - 1
            tl.store(counts_ptr + target, tl.max(place, 0) + 1)
            listed = listed_ptr + target * SEGMENT + place
            tl.store(listed, offsets.to(tl.int16), mask=near & (place < SEGMENT))


@triton.jit
def min_p_distance(min_p: tl.tensor) -> tl.tensor:
    """The distance of an id with min_p times the highest weight: infinity for 0."""
    logarithm = tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64)).to(tl.float32)
    return tl.where(min_p > 0, 0.0 - logarithm, float("inf"))


@triton.jit
def load_listed(
    counts_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    row: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A row's listed ids in order, int32 [TILE]; which of them are there; whether that is all in reach."""
    position = tl.arange(0, TILE)
    source = tl.zeros_like(position)
    begin = tl.zeros_like(position)
    # Not from num_chunks: an argument that is 1 is no tensor.
    total = tl.program_id(0) * 0
    longest = total
    for chunk in range(0, num_chunks):
        count = tl.load(counts_ptr + row * num_chunks + chunk)
        inside = position >= total
        source = tl.where(inside, chunk * SEGMENT + position - total, source)
        begin = tl.where(inside, chunk * CHUNK, begin)
        total += count
        longest = tl.maximum(longest, count)
    complete = (total <= TILE) & (longest <= SEGMENT)
    present = (position < total) & complete
    offsets = tl.load(listed_ptr + row * num_chunks * SEGMENT + source, mask=present, other=0)
    return begin + offsets.to(tl.int32), present, complete
