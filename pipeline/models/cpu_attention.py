"""Paged attention on the CPU, made so that a token's result depends on itself and its context alone.

Every query is multiplied with whole blocks of keys and the blocks' partial softmaxes are combined
from the first block to the last. Matrix shapes are fixed: queries come in tiles padded to 16 or 64
rows (measured: from 16 rows on, this machine's float32 GEMMs give a row the same bits whatever
stands beside it), and a block is a block. So it makes no difference in any bit whether a position
is computed alone, in a prompt chunk, after a shared prefix or again after a preemption.

Shapes: T = tokens, Hq = query heads, H = KV heads, G = Hq / H, D = head width, P = block size,
W = tiles, Q = query rows of a tile (tokens x G, padded), E = pairs of a tile and a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

_SMALL_TILE_ROWS = 16
_LARGE_TILE_ROWS = 64
# Stands for -inf where a whole block is masked: its weight becomes 0 without a NaN on the way.
_MASKED = -1e30


@dataclass(frozen=True)
class TilePlan:
    """Tiles of one size, those with most blocks first, and the blocks each must read.

    tokens: int64 [W, q], flat tokens of each tile (the last one repeated as padding).
    real: bool [W, q]. pair_tile, pair_block: int64 [E], block after block: first the first block
    of every tile, then the second of every tile that has one, … blocks_at: int64 [max blocks], how
    many tiles have an i-th block. visible: bool [E, q, P], the keys each query may see.
    """

    tokens: torch.Tensor
    real: torch.Tensor
    pair_tile: torch.Tensor
    pair_block: torch.Tensor
    blocks_at: torch.Tensor
    visible: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [self.tokens, self.real, self.pair_tile, self.pair_block, self.blocks_at, self.visible]


def plan_tiles(
    starts: np.ndarray,
    query_lens: np.ndarray,
    block_tables: np.ndarray,
    *,
    block_size: int,
    group_size: int,
    window: int | None,
) -> list[TilePlan]:
    """Plan a step's attention: starts, query_lens int32 [R], block_tables int32 [R, B].

    window: how many of the last positions a query sees, itself included; None sees all.
    """
    small = max(1, _SMALL_TILE_ROWS // group_size)
    large = max(1, _LARGE_TILE_ROWS // group_size)
    first_token = np.cumsum(query_lens) - query_lens
    plans = []
    for width, rows in (
        (small, np.flatnonzero(query_lens <= small)),
        (large, np.flatnonzero(query_lens > small)),
    ):
        if len(rows):
            plans.append(
                _plan(rows, width, first_token, starts, query_lens, block_tables, block_size, window)
            )
    return plans


def plan_tensors(
    starts: np.ndarray,
    query_lens: np.ndarray,
    block_tables: np.ndarray,
    *,
    block_size: int,
    group_size: int,
    window: int | None,
) -> list[torch.Tensor]:
    """The same as one flat list of tensors, as the attention operator takes it."""
    plans = plan_tiles(
        starts, query_lens, block_tables, block_size=block_size, group_size=group_size, window=window
    )
    return [tensor for plan in plans for tensor in plan.tensors()]


def _plan(
    rows: np.ndarray,
    width: int,
    first_token: np.ndarray,
    starts: np.ndarray,
    query_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    window: int | None,
) -> TilePlan:
    tiles_of = -(-query_lens[rows] // width)
    tile_row = np.repeat(rows, tiles_of)
    offset = (np.arange(len(tile_row)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)) * width
    first = starts[tile_row] + offset
    last = starts[tile_row] + np.minimum(offset + width, query_lens[tile_row]) - 1
    first_block = np.zeros_like(first) if window is None else np.maximum(first - window + 1, 0) // block_size
    num_blocks = last // block_size + 1 - first_block
    order = np.argsort(-num_blocks, kind="stable")
    tile_row, offset, first, last, first_block, num_blocks = (
        a[order] for a in (tile_row, offset, first, last, first_block, num_blocks)
    )
    blocks_at = (num_blocks[:, None] > np.arange(num_blocks[0])).sum(axis=0)
    pair_tile = np.concatenate([np.arange(n) for n in blocks_at])
    pair_index = first_block[pair_tile] + np.repeat(np.arange(len(blocks_at)), blocks_at)
    positions = first[:, None] + np.arange(width)
    keys = pair_index[:, None] * block_size + np.arange(block_size)
    visible = keys[:, None, :] <= positions[pair_tile][:, :, None]
    if window is not None:
        visible &= keys[:, None, :] > positions[pair_tile][:, :, None] - window
    inside = positions <= last[:, None]
    tokens = (first_token[tile_row] + offset)[:, None] + np.minimum(np.arange(width), (last - first)[:, None])
    return TilePlan(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        real=torch.from_numpy(inside),
        pair_tile=torch.from_numpy(pair_tile.astype(np.int64)),
        pair_block=torch.from_numpy(block_tables[tile_row[pair_tile], pair_index].astype(np.int64)),
        blocks_at=torch.from_numpy(blocks_at.astype(np.int64)),
        visible=torch.from_numpy(visible),
    )


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: list[torch.Tensor],
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Attention of one plan's tokens: query [T, Hq, D], keys and values [N, H, P, D] -> out [T, Hq, D]."""
    tokens, real, pair_tile, pair_block, blocks_at, visible = plan
    num_kv_heads, block_size, head_dim = keys.shape[1:]
    tiles, width = tokens.shape
    group = query.shape[1] // num_kv_heads
    rows = -(-width * group // 16) * 16
    # [W, q, H, G, D] -> [W, H, q * G, D], padded to the tile's rows.
    tiled = query[tokens].view(tiles, width, num_kv_heads, group, head_dim).transpose(1, 2)
    padded = query.new_zeros(tiles, num_kv_heads, rows, head_dim)
    padded[:, :, : width * group] = tiled.reshape(tiles, num_kv_heads, width * group, head_dim) * scale

    pairs = len(pair_tile)
    q = padded[pair_tile].view(pairs * num_kv_heads, rows, head_dim)
    k = keys[pair_block].view(pairs * num_kv_heads, block_size, head_dim)
    # From here on without the padding, which is most of a decoding row's tile.
    used = width * group
    scores = torch.bmm(q, k.transpose(1, 2)).view(pairs, num_kv_heads, rows, block_size)[:, :, :used]
    # Half types are summed in float32; the self-check runs in float64 throughout.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = visible.repeat_interleave(group, dim=1)[:, None]
    scores = scores.masked_fill(~seen, _MASKED)
    highest = scores.amax(dim=-1, keepdim=True)
    weights = (scores - highest).exp()
    mass = weights.sum(dim=-1, keepdim=True)
    v = values[pair_block].view(pairs * num_kv_heads, block_size, head_dim)
    padded_weights = v.new_zeros(pairs, num_kv_heads, rows, block_size)
    padded_weights[:, :, :used] = weights
    partial = torch.bmm(padded_weights.view(-1, rows, block_size), v)
    partial = partial.view(pairs, num_kv_heads, rows, head_dim)[:, :, :used].to(scores.dtype)

    combined = _combine(highest, mass, partial, blocks_at.tolist(), sinks, width, group)
    combined = combined.view(tiles, num_kv_heads, width, group, head_dim)
    flat = combined.transpose(1, 2).reshape(tiles, width, num_kv_heads * group, head_dim)
    out[tokens[real]] = flat[real].to(out.dtype)


def _combine(
    highest: torch.Tensor,
    mass: torch.Tensor,
    partial: torch.Tensor,
    blocks_at: list[int],
    sinks: torch.Tensor | None,
    width: int,
    group: int,
) -> torch.Tensor:
    """Merge the blocks' softmaxes, first to last: [E, H, Q, ·] -> [W, H, Q, D]."""
    tiles = blocks_at[0]
    top, total, result = highest[:tiles].clone(), mass[:tiles].clone(), partial[:tiles].clone()
    begin = tiles
    for count in blocks_at[1:]:
        part = slice(begin, begin + count)
        begin += count
        new_top = torch.maximum(top[:count], highest[part])
        old_weight, new_weight = (top[:count] - new_top).exp(), (highest[part] - new_top).exp()
        total[:count] = total[:count] * old_weight + mass[part] * new_weight
        result[:count] = result[:count] * old_weight + partial[part] * new_weight
        top[:count] = new_top
    if sinks is not None:
        # A sink is a key without a value: it takes its share of the mass and adds nothing.
        by_row = (
            sinks.to(total.dtype)
            .view(1, -1, 1, group)
            .expand(-1, -1, width, -1)
            .reshape(1, -1, width * group, 1)
        )
        total += (by_row - top).exp()
    return result / total
