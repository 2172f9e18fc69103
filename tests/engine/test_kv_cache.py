"""Bytes and shapes of the KV memory, and how layer groups share it."""

from __future__ import annotations

import pytest
import torch

from pipeline.engine.kv_cache import GroupDemand, KVCache, KVShape, share_blocks

SHAPE = KVShape(num_kv_heads=2, head_dim=16, dtype=torch.bfloat16)
GIB = 2**30


def test_bytes_are_those_of_the_tensors() -> None:
    cache = KVCache(SHAPE, {0: 5, 1: 3, 2: 5}, 8, torch.device("cpu"))
    held = sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))
    assert held == cache.num_bytes == 13 * SHAPE.bytes_per_block(8) == 13 * 1024


def test_layers_have_memory_of_their_own_in_the_order_of_the_layers() -> None:
    cache = KVCache(SHAPE, {2: 5, 0: 4, 1: 3}, 8, torch.device("cpu"))
    assert len({t.data_ptr() for t in (*cache.keys, *cache.values)}) == 6
    for tensors in (cache.keys, cache.values):
        assert [tuple(t.shape) for t in tensors] == [(n, 2, 8, 16) for n in (4, 3, 5)]
        assert all(t.dtype == torch.bfloat16 and not t.any() for t in tensors)


def test_one_group_takes_what_fits_and_no_more_than_it_has_a_use_for() -> None:
    gigabytes = 10.5 * 3 * 1024 / GIB
    assert share_blocks({None: GroupDemand(3, 1000)}, 1024, gigabytes) == {None: 10}
    assert share_blocks({None: GroupDemand(3, 4)}, 1024, gigabytes) == {None: 4}


def test_groups_together_stay_within_the_memory() -> None:
    demands = {None: GroupDemand(2, 10**6), 64: GroupDemand(6, 10), 128: GroupDemand(4, 10**6)}
    blocks = share_blocks(demands, 1024, 1000 * 1024 / GIB)
    assert blocks[64] == 10, "a small group has all it can use"
    used = sum(demands[window].num_layers * count for window, count in blocks.items())
    assert 990 <= used <= 1000
    assert demands[128].num_layers * blocks[128] <= 250, "its share of half the memory"


@pytest.mark.parametrize("window", [None, 64])
def test_too_little_memory_names_key_and_remedy(window: int | None) -> None:
    with pytest.raises(ValueError, match=r"engine\.kv_cache_gb=1e-06 holds 0 blocks.*raise it, or lower"):
        share_blocks({window: GroupDemand(3, 10)}, 1024, 1e-6)
