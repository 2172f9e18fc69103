"""Draws one id a row: among the listed ids where the filters leave no others, else by chunks of the row.

A row without top-k and top-p has its masses by chunk already; the draw finds the chunk, then the id. With
them the listed ids nearly always hold all that is left. Where they do not (a long nucleus, more equals than
the list takes, a great k) this row's program searches the limit over the whole row, several passes, and adds
up the masses of the chunks anew.

Shapes: N = rows, C = chunks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pipeline.kernels.sample_scan import load_listed, min_p_distance
from pipeline.kernels.sample_tiles import (
    KEY_INFINITE,
    KEY_NONE,
    among_nearest,
    distances,
    first_beyond,
    key_of,
    load_logits,
    nearest_in_row,
    nearest_in_tile,
    sums_within,
)


@triton.jit
def _equals_needed(wanted: tl.tensor, above: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """How many ids at the limit bring the mass above it, float64, to what is wanted; at least one."""
    weight = tl.exp(0.0 - limit.to(tl.float32, bitcast=True)).to(tl.float64)
    number = tl.ceil((wanted - above) / tl.where(weight > 0, weight, 1.0))
    # The quotient is rounded; what counts is the sum.
    number = tl.where(above + (number - 1) * weight >= wanted, number - 1, number)
    number = tl.where(above + number * weight < wanted, number + 1, number)
    return tl.maximum(tl.minimum(number, KEY_NONE), 1).to(tl.int32)


@triton.jit
def _draw_among_listed(
    ids: tl.tensor,
    distance: tl.tensor,
    present: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    row_mass: tl.tensor,
    min_p_limit: tl.tensor,
    uniform: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """-> (whether the filters leave none but ids of the tile, the id drawn)."""
    keys = tl.where(present, key_of(distance), KEY_NONE)
    weights = tl.where(present, tl.exp(-distance), 0.0).to(tl.float64)
    limit = tl.zeros_like(top_k) + KEY_INFINITE
    room = tl.zeros_like(top_k) + KEY_NONE
    enough = tl.sum(present.to(tl.int32), 0) >= top_k
    if top_k > 0:
        limit = nearest_in_tile(keys, present.to(tl.int32), top_k, limit)
    held = tl.sum(tl.where(keys <= limit, weights, 0.0), 0)
    if top_p < 1.0:
        wanted = top_p.to(tl.float64) * tl.where(top_k > 0, held, row_mass)
        enough = enough & (held >= wanted)
        limit = nearest_in_tile(keys, weights, wanted, limit)
        room = _equals_needed(wanted, tl.sum(tl.where(keys < limit, weights, 0.0), 0), limit)
    zero = tl.zeros_like(room)
    kept = among_nearest(keys, limit, zero, room) & (distance <= min_p_limit)
    weights = tl.where(kept, weights, 0.0)
    threshold = uniform * tl.sum(weights, 0)
    return enough, first_beyond(ids, weights, threshold, 0.0)


@triton.jit
def _search_row(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    low: tl.tensor,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(limit, room) of what top-k and top-p leave of the whole row; the limit is known to be at least low."""
    limit = tl.zeros_like(top_k) + KEY_INFINITE
    room = tl.zeros_like(top_k) + KEY_NONE
    if top_k > 0:
        limit = nearest_in_row(
            row_ptr, vocab_size, width, highest, temperature, 0.0, top_k, low, limit, False, BLOCK, WAYS
        )
    if top_p < 1.0:
        one = tl.arange(0, 1)
        held = sums_within(row_ptr, vocab_size, width, highest, temperature, 0.0, one + limit, True, BLOCK, 1)
        wanted = top_p.to(tl.float64) * tl.sum(held, 0)
        limit = nearest_in_row(
            row_ptr, vocab_size, width, highest, temperature, 0.0, wanted, low, limit, True, BLOCK, WAYS
        )
        above = sums_within(
            row_ptr, vocab_size, width, highest, temperature, 0.0, one + limit - 1, True, BLOCK, 1
        )
        room = _equals_needed(wanted, tl.sum(above, 0), limit)
    return limit, room


@triton.jit
def _chunk_weights(
    row_ptr: tl.tensor,
    ids: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    rank_before: tl.tensor,
    room: tl.tensor,
    min_p_limit: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """-> (float64 weights of a chunk's ids, 0 where filtered; how many of them are equal to the limit)."""
    distance = distances(load_logits(row_ptr, ids, vocab_size, width), highest, temperature, 0.0)
    keys = key_of(distance)
    kept = among_nearest(keys, limit, rank_before, room) & (distance <= min_p_limit)
    weights = tl.where(kept, tl.exp(-distance), 0.0).to(tl.float64)
    return weights, tl.sum((keys == limit).to(tl.int32), 0)


@triton.jit
def _draw_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    highest_ptr: tl.tensor,
    log_total_ptr: tl.tensor,
    best_ptr: tl.tensor,
    reach_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    listed_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    stride_logits: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    num_chunks: tl.tensor,
    RECORDS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> None:
    """ids int64 [N], logprobs float32 [N]. ranks int32 [N, C]: scratch, equals before a chunk."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_logits
    masses_ptr += row * num_chunks
    ranks_ptr += row * num_chunks
    highest = tl.load(highest_ptr + row)
    chosen = tl.load(best_ptr + row)
    temperature = tl.load(temperature_ptr + row)
    settled = temperature <= 0
    if temperature > 0:
        uniform = tl.load(uniform_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        top_k = tl.minimum(tl.load(top_k_ptr + row), vocab_size).to(tl.int32)
        min_p_limit = min_p_distance(tl.load(min_p_ptr + row))
        filtered = (top_k > 0) | (top_p < 1.0)
        limit = tl.zeros_like(top_k) + KEY_INFINITE
        room = tl.zeros_like(top_k) + KEY_NONE
        chunk = tl.arange(0, CHUNKS)
        low = tl.zeros_like(top_k)
        if filtered:
            reach = tl.load(reach_ptr + row)
            if reach >= 0:
                row_mass = tl.sum(tl.load(masses_ptr + chunk, mask=chunk < num_chunks, other=0.0), 0)
                listed, present, settled = load_listed(
                    counts_ptr, listed_ptr, row, num_chunks, CHUNK, SEGMENT, TILE
                )
                if settled:
                    x = tl.load(row_ptr + listed, mask=present, other=-float("inf")).to(tl.float32)
                    distance = distances(x, highest, temperature, 0.0)
                    present = present & (distance <= tl.div_rn(reach, temperature))
                    settled, chosen = _draw_among_listed(
                        listed, distance, present, top_k, top_p, row_mass, min_p_limit, uniform
                    )
                    # A nucleus that goes beyond the list has its limit beyond the list's.
                    low = tl.where(top_k > 0, 0, key_of(tl.div_rn(reach, temperature)))
            if settled == 0:
                limit, room = _search_row(
                    row_ptr, vocab_size, width, highest, temperature, top_k, top_p, low, BLOCK, WAYS
                )
                rank = tl.zeros_like(room)
                # All have read the masses that are overwritten.
                tl.debug_barrier()
                for index in range(0, num_chunks):
                    ids = index * CHUNK + tl.arange(0, CHUNK)
                    weights, num_equal = _chunk_weights(
                        row_ptr, ids, vocab_size, width, highest, temperature, limit, rank, room, min_p_limit
                    )
                    tl.store(masses_ptr + index, tl.sum(weights, 0))
                    tl.store(ranks_ptr + index, rank)
                    rank += num_equal
                tl.debug_barrier()
        if settled == 0:
            masses = tl.load(masses_ptr + chunk, mask=chunk < num_chunks, other=0.0)
            threshold = uniform * tl.sum(masses, 0)
            index = first_beyond(chunk, masses, threshold, 0.0)
            before = tl.sum(tl.where(chunk < index, masses, 0.0), 0)
            rank = tl.load(ranks_ptr + index, mask=filtered, other=0)
            ids = index * CHUNK + tl.arange(0, CHUNK)
            weights, _ = _chunk_weights(
                row_ptr, ids, vocab_size, width, highest, temperature, limit, rank, room, min_p_limit
            )
            chosen = first_beyond(ids, weights, threshold, before)
    tl.store(ids_ptr + row, chosen.to(tl.int64))
    if RECORDS:
        x = tl.load(row_ptr + chosen).to(tl.float32)
        tl.store(logprobs_ptr + row, 0.0 - (highest - x + tl.load(log_total_ptr + row)))
