"""How many KV blocks each layer group of a model gets, and the tables that say who holds them.

Knows a model's layers and the engine's settings; refuses to know the memory itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config import EngineConfig
from pipeline.engine.block_manager import BlockManager
from pipeline.engine.block_tables import BlockGroup, BlockTables
from pipeline.engine.kv_cache import GroupDemand, KVShape, share_blocks
from pipeline.models.load import LoadedModel


def kv_shape(loaded: LoadedModel) -> KVShape:
    return KVShape(loaded.architecture.num_kv_heads, loaded.architecture.head_dim, loaded.dtype)


def num_blocks_of(
    loaded: LoadedModel,
    config: EngineConfig,
    layers: Mapping[int | None, tuple[int, ...]],
    gigabytes: float,
) -> dict[int | None, int]:
    """Blocks of each layer group: engine.num_blocks for each, or what so many GiB hold."""
    if config.num_blocks is not None:
        return dict.fromkeys(layers, config.num_blocks)
    demands = {}
    for window, group in layers.items():
        longest = loaded.max_model_len
        if window is not None:
            longest = min(longest, window + config.max_num_batched_tokens + config.block_size)
        blocks = -(-longest // config.block_size) + 1
        # Twice what all slots can hold: the rest keeps prefixes that may be wanted again.
        demands[window] = GroupDemand(len(group), 2 + 2 * config.max_num_seqs * blocks)
    return share_blocks(demands, kv_shape(loaded).bytes_per_block(config.block_size), gigabytes)


def block_tables_of(
    loaded: LoadedModel, config: EngineConfig, num_blocks: Mapping[int | None, int]
) -> BlockTables:
    longest = -(-loaded.max_model_len // config.block_size)
    return BlockTables(
        [
            BlockGroup(
                window,
                BlockManager(count, config.block_size),
                config.max_num_seqs,
                longest,
                config.max_num_batched_tokens,
            )
            for window, count in num_blocks.items()
        ]
    )
