"""The KV memory itself: one tensor of keys and one of values per layer, cut into blocks.

Knows shapes and bytes; refuses to know who owns a block. The CPU layout puts a block's positions
beside each other per head, so that a gathered block is a matrix ready for multiplication.

Shapes: N = blocks, H = KV heads, P = positions per block (block_size), D = head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVShape:
    """What one layer keeps per position."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_block(self, block_size: int) -> int:
        per_position = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_position * block_size


class KVCache:
    """keys[layer], values[layer]: [N, H, P, D]."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        size = (num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
        # Zeros, not garbage: masked positions are multiplied by a weight of 0, and 0 x NaN is NaN.
        self.keys = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        self.values = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]


def num_blocks_for(shape: KVShape, block_size: int, gigabytes: float) -> int:
    """Blocks that fit into so many GiB; ValueError if not even two do."""
    count = int(gigabytes * 2**30 // shape.bytes_per_block(block_size))
    if count < 2:
        raise ValueError(
            f"engine.kv_cache_gb={gigabytes} holds {count} blocks of "
            f"{shape.bytes_per_block(block_size)} bytes: raise it or lower engine.block_size"
        )
    return count
