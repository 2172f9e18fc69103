"""What the sampling kernels share: a logit's distance from the highest, and sets of the nearest ids.

An id is the likelier the smaller its distance: (highest - logit) / temperature + shift, never negative, 0 or
the shift for the highest. With the row's temperature and no shift exp(-distance) is the id's weight in the
draw; with temperature 1 and the logarithm of the summed weights as shift it is the negated log-probability.
The bits of such a float, read as an integer, sort as the float does: that is the key. A set of the nearest
ids is all keys below a limit and the first `room` of those equal to it, in id order.

Sums run in an order that depends on the size of the vocabulary alone, masses in float64. Knows one row at a
time; refuses to know what a set is for.

Shapes: B = ids of a tile, W = limits tried at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The key of an id that cannot be drawn, at distance infinity; and one beyond all keys.
KEY_INFINITE: tl.constexpr = tl.constexpr(0x7F800000)
KEY_NONE: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def load_logits(row_ptr: tl.tensor, ids: tl.tensor, vocab_size: tl.tensor, width: tl.tensor) -> tl.tensor:
    """float32; -inf at and above vocab_size, which is at most width, the row's length."""
    # By the width, which is nearly always a multiple of 16: only then are the loads wide.
    x = tl.load(row_ptr + ids, mask=ids < width, other=-float("inf")).to(tl.float32)
    return tl.where(ids < vocab_size, x, -float("inf"))


@triton.jit
def distances(x: tl.tensor, highest: tl.tensor, temperature: tl.tensor, shift: tl.tensor) -> tl.tensor:
    # Rounded as division is elsewhere: which logits become equal by it decides who shares a rank.
    return tl.div_rn(highest - x, tl.zeros_like(x) + temperature) + shift


@triton.jit
def key_of(distance: tl.tensor) -> tl.tensor:
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def among_nearest(keys: tl.tensor, limit: tl.tensor, rank_before: tl.tensor, room: tl.tensor) -> tl.tensor:
    """Whether each of keys [B], in id order, is in the set; rank_before ids equal to limit came before."""
    equal = keys == limit
    rank = rank_before + tl.cumsum(equal.to(tl.int32), 0)
    return (keys < limit) | (equal & (rank <= room))


@triton.jit
def first_beyond(ids: tl.tensor, weights: tl.tensor, threshold: tl.tensor, before: tl.tensor) -> tl.tensor:
    """The first id with weight at which before + the weights so far exceed threshold, else the last."""
    cumulative = before + tl.cumsum(weights, 0)
    some = weights > 0
    first = tl.min(tl.where(some & (cumulative > threshold), ids, KEY_NONE), 0)
    return tl.minimum(first, tl.max(tl.where(some, ids, 0), 0))


@triton.jit
def nearest_in_tile(keys: tl.tensor, weights: tl.tensor, goal: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The lowest limit up to high within which weights [B] add up to goal; high if none."""
    low = tl.zeros_like(high)
    while low < high:
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(keys <= middle, weights, 0), 0) >= goal
        low = tl.where(reached, low, middle + 1)
        high = tl.where(reached, middle, high)
    return high


@triton.jit
def sums_within(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    shift: tl.tensor,
    limits: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """float64 [W]: the mass, or the number, of the ids with keys up to each of limits int32 [W]."""
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK, WAYS], tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + offsets
        distance = distances(load_logits(row_ptr, ids, vocab_size, width), highest, temperature, shift)
        weights = tl.exp(-distance).to(tl.float64) if BY_MASS else (ids < vocab_size).to(tl.float64)
        sums += tl.where(key_of(distance)[:, None] <= limits[None, :], weights[:, None], 0.0)
    return tl.sum(sums, 0)


@triton.jit
def nearest_in_row(
    row_ptr: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    shift: tl.tensor,
    goal: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """As nearest_in_tile, from low on, over the whole row: a pass leaves one part in W + 1 of the limits."""
    ways = tl.arange(0, WAYS)
    while low < high:
        step = (high - low) // (WAYS + 1) + 1
        limits = low + (ways + 1) * step - 1
        sums = sums_within(
            row_ptr, vocab_size, width, highest, temperature, shift, limits, BY_MASS, BLOCK, WAYS
        )
        low += tl.sum((sums < goal).to(tl.int32), 0) * step
        high = tl.minimum(high, low + step - 1)
    return high
