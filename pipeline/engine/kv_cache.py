"""The KV memory itself: one tensor of keys and one of values per layer, cut into blocks.

Knows shapes and bytes; refuses to know who owns a block. The CPU layout puts a block's positions
beside each other per head, so that a gathered block is a matrix ready for multiplication.

Shapes: N = blocks of the layer's group, H = KV heads, P = positions per block, D = head width.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVShape:
    """What one layer keeps per position."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_block(self, block_size: int) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize * block_size


class KVCache:
    """keys[layer], values[layer]: [N, H, P, D]. num_blocks: N of each layer."""

    def __init__(
        self, shape: KVShape, num_blocks: Mapping[int, int], block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        needed = sum(num_blocks.values()) * shape.bytes_per_block(block_size)
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if device.type == "cpu" and needed > there:
            raise ValueError(
                f"engine.num_blocks={max(num_blocks.values())} takes {needed / 2**30:.1f} GiB and this "
                f"machine has {there / 2**30:.1f}: lower it, or set engine.kv_cache_gb instead"
            )
        # Zeros, not garbage: masked positions are multiplied by a weight of 0, and 0 x NaN is NaN.
        self.keys, self.values = (
            [
                torch.zeros(
                    (num_blocks[layer], shape.num_kv_heads, block_size, shape.head_dim),
                    dtype=shape.dtype,
                    device=device,
                )
                for layer in sorted(num_blocks)
            ]
            for _ in range(2)
        )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))


@dataclass(frozen=True)
class GroupDemand:
    """What a layer group would take: its number of layers, and the most blocks it has a use for."""

    num_layers: int
    most_blocks: int


def share_blocks(
    demands: Mapping[int | None, GroupDemand], bytes_per_block: int, gigabytes: float
) -> dict[int | None, int]:
    """Blocks for each layer group (by window) within so many GiB; ValueError if they are too few.

    Sliding groups come first, with what all slots can use but no more than their share of half the
    memory: they are small, and whoever lacks a window's block cannot go on. The full group has the
    rest.
    """
    memory = int(gigabytes * 2**30)
    blocks: dict[int | None, int] = {}
    sliding = {window: d for window, d in demands.items() if window is not None}
    allowance = memory // (2 if None in demands else 1) // max(len(sliding), 1)
    for window, demand in sliding.items():
        per_block = demand.num_layers * bytes_per_block
        blocks[window] = min(demand.most_blocks, allowance // per_block)
        memory -= blocks[window] * per_block
    if full := demands.get(None):
        blocks[None] = min(full.most_blocks, memory // (full.num_layers * bytes_per_block))
    for group, count in blocks.items():
        if count < 2:
            kind = "full attention" if group is None else f"a window of {group}"
            raise ValueError(
                f"engine.kv_cache_gb={gigabytes} holds {count} blocks for the "
                f"{demands[group].num_layers} layers with {kind}: raise it, or lower engine.block_size"
            )
    return blocks
