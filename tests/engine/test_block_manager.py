"""Blocks: each owned as often as it is referenced, all back at the end, prefixes found while unused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pipeline.engine.block_manager import NULL_BLOCK, BlockManager, hash_blocks

NUM_BLOCKS = 9


class BlocksAgainstAModel(RuleBasedStateMachine):
    """Any order of allocate, share, register and free, beside a plain model of ownership."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, 4)
        self.owners: list[list[int]] = []
        # What was last written under a name in each block; a new owner overwrites it.
        self.content: dict[int, bytes] = {}
        self.named: dict[bytes, int] = {}

    def references(self, block: int) -> int:
        return sum(owner.count(block) for owner in self.owners)

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = self.blocks.num_free
        taken = self.blocks.allocate(count)
        assert (taken is None) == (count > free)
        if taken is None:
            assert self.blocks.num_free == free
            return
        assert len(taken) == len(set(taken)) == count
        for block in taken:
            assert block != NULL_BLOCK and self.references(block) == 0
            self.named = {name: b for name, b in self.named.items() if b != block}
            self.content.pop(block, None)
        self.owners.append(taken)

    @precondition(lambda self: any(self.owners))
    @rule(data=st.data(), name=st.binary(min_size=1, max_size=1))
    def register(self, data: st.DataObject, name: bytes) -> None:
        block = data.draw(st.sampled_from([b for owner in self.owners for b in owner]))
        if block not in self.content and name not in self.named:
            self.content[block] = name
            self.named[name] = block
        self.blocks.register(block, name)

    @rule(names=st.lists(st.binary(min_size=1, max_size=1), max_size=4, unique=True))
    def share_a_prefix(self, names: list[bytes]) -> None:
        found = self.blocks.find_prefix(names)
        expected = []
        for name in names:
            if name not in self.named:
                break
            expected.append(self.named[name])
        assert found == expected
        assert self.blocks.num_unowned(found) == sum(self.references(b) == 0 for b in found)
        self.blocks.share(found)
        self.owners.append(found)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.blocks.free(owner)

    @invariant()
    def free_are_those_without_an_owner(self) -> None:
        assert self.blocks.num_free == sum(self.references(b) == 0 for b in range(1, NUM_BLOCKS))

    def teardown(self) -> None:
        for owner in self.owners:
            self.blocks.free(owner)
        assert self.blocks.num_free == self.blocks.capacity
        everything = self.blocks.allocate(self.blocks.capacity)
        assert everything is not None and sorted(everything) == list(range(1, NUM_BLOCKS))


TestBlocks = BlocksAgainstAModel.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_sizes() -> None:
    blocks = BlockManager(10, 16)
    assert (blocks.capacity, blocks.num_free) == (9, 9)
    assert [blocks.blocks_for(n) for n in (0, 1, 16, 17, 160)] == [0, 1, 1, 2, 10]


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"engine.num_blocks={num_blocks}"):
        BlockManager(num_blocks, 16)


def test_freeing_twice_is_our_own_mistake() -> None:
    blocks = BlockManager(4, 16)
    taken = blocks.allocate(1)
    assert taken is not None
    blocks.free(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free(taken)


def test_a_freed_prefix_is_found_until_its_block_is_handed_out_again() -> None:
    blocks = BlockManager(4, 2)
    names = hash_blocks(np.array([1, 2, 3, 4], np.int32), 2)
    first = blocks.allocate(2)
    assert first is not None
    for block, name in zip(first, names, strict=True):
        blocks.register(block, name)
    blocks.free(first)
    assert blocks.find_prefix(names) == first and blocks.num_unowned(first) == 2
    # The block never used before goes first, then the end of the prefix, its beginning last.
    assert blocks.allocate(1) == [3]
    assert blocks.allocate(1) == [first[1]]
    assert blocks.find_prefix(names) == first[:1]
    assert blocks.allocate(1) == [first[0]]
    assert blocks.find_prefix(names) == []


def test_the_prefix_cache_does_not_grow_with_the_prompts_seen() -> None:
    blocks = BlockManager(20, 2)
    for i in range(3_000):
        taken = blocks.allocate(3)
        assert taken is not None
        for block, name in zip(taken, hash_blocks(np.arange(i, i + 6, dtype=np.int32), 2), strict=True):
            blocks.register(block, name)
        blocks.free(taken)
    assert len(blocks._block_of) <= 19 and len(blocks._hash_of) <= 19


def test_hashes_name_a_block_and_all_before_it() -> None:
    a = hash_blocks(np.array([1, 2, 3, 4, 5], np.int32), 2)
    b = hash_blocks(np.array([1, 2, 9, 4, 5], np.int32), 2)
    c = hash_blocks(np.array([3, 4, 1, 2], np.int32), 2)
    assert len(a) == 2 and a[0] == b[0] and a[1] != b[1]
    assert not set(a) & set(c)
    assert len({len(name) for name in a + b + c}) == 1


def test_hashes_extend_a_chain() -> None:
    tokens = np.arange(40, dtype=np.int32)
    whole = hash_blocks(tokens, 4)
    part = hash_blocks(tokens[:17], 4)
    assert hash_blocks(tokens, 4, part) == whole
    assert hash_blocks(tokens, 4, stop=3) == whole[:3]
    assert hash_blocks(tokens.astype(np.int64), 4) == whole
    assert hash_blocks(tokens[:3], 4) == []
