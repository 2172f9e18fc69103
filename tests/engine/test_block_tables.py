"""Which blocks a sequence holds: all of them under full attention, a window's worth under a sliding one."""

from __future__ import annotations

import numpy as np

from pipeline.engine.block_manager import NULL_BLOCK, BlockManager, hash_blocks
from pipeline.engine.block_tables import BlockGroup, BlockTables

BLOCK_SIZE = 4
NOBODY = np.zeros(3, bool)


def tables(*windows: int | None, num_blocks: int = 20, budget: int = 8) -> BlockTables:
    return BlockTables([BlockGroup(w, BlockManager(num_blocks, BLOCK_SIZE), 3, 32, budget) for w in windows])


def admit(blocks: BlockTables, slot: int, hashes: list[bytes], num_tokens: int) -> int:
    prefix = blocks.find_prefix(hashes)
    blocks.admit(slot, num_tokens, num_tokens, prefix)
    return prefix.num_blocks


def held(group: BlockGroup, slot: int) -> list[int]:
    return [block for block in group.table[slot].tolist() if block != NULL_BLOCK]


def test_a_sliding_group_gives_back_what_lies_behind_its_window() -> None:
    blocks = tables(None, 6)
    full, sliding = blocks.groups
    admit(blocks, 0, [], 40)
    assert blocks.cover(0, 24)
    assert len(held(full, 0)) == len(held(sliding, 0)) == 6
    # Position 24 sees 19 to 24: blocks 4 and 5 stay, and 6 is to come.
    blocks.slide(np.array([0]), np.array([24]))
    assert (len(held(full, 0)), len(held(sliding, 0))) == (6, 2)
    assert sliding.table[0, :6].tolist() == [NULL_BLOCK] * 4 + sliding.table[0, 4:6].tolist()
    blocks.slide(np.array([0]), np.array([24]))
    assert len(held(sliding, 0)) == 2
    assert blocks.cover(0, 25) and len(held(sliding, 0)) == 3
    blocks.release(0)
    assert all(g.manager.num_free == g.manager.capacity for g in blocks.groups)


def test_the_first_visible_position_is_never_given_back() -> None:
    for window in range(1, 14):
        blocks = tables(window, num_blocks=40)
        (group,) = blocks.groups
        admit(blocks, 0, [], 60)
        for position in range(60):
            blocks.slide(np.array([0]), np.array([position]))
            assert blocks.cover(0, position + 1)
            for seen in range(max(0, position - window + 1), position + 1):
                assert group.table[0, seen // BLOCK_SIZE] != NULL_BLOCK
            assert len(held(group, 0)) <= group.needed(60, 60)


def test_taking_blocks_is_all_or_nothing_over_the_groups() -> None:
    blocks = BlockTables(
        [
            BlockGroup(None, BlockManager(10, BLOCK_SIZE), 3, 32, 8),
            BlockGroup(6, BlockManager(4, BLOCK_SIZE), 3, 32, 8),
        ]
    )
    admit(blocks, 0, [], 8)
    assert not blocks.cover(0, 16)
    assert [g.manager.num_free for g in blocks.groups] == [9, 3] and blocks.num_blocks[0] == 0
    assert blocks.cover(0, 12)
    assert [g.manager.num_free for g in blocks.groups] == [6, 0]


def test_a_sliding_group_holds_rows_longer_than_its_blocks() -> None:
    blocks = tables(6, num_blocks=6)
    assert blocks.fits(1_000)
    assert not tables(None, num_blocks=6).fits(21) and tables(None, num_blocks=6).fits(20)
    assert not tables(None, 6, num_blocks=6).fits(21)


def test_a_prefix_is_shared_as_far_as_every_group_still_has_it() -> None:
    blocks = tables(None, 6)
    full, sliding = blocks.groups
    hashes = hash_blocks(np.arange(24, dtype=np.int32), BLOCK_SIZE)
    admit(blocks, 0, [], 24)
    blocks.cover(0, 24)
    blocks.register(0, hashes, 24)
    assert blocks.find_prefix(hashes).num_blocks == 6
    # Whoever begins at 24 needs positions 19 to 23 of the sliding group, nothing before.
    blocks.slide(np.array([0]), np.array([24]))
    prefix = blocks.find_prefix(hashes)
    assert prefix.num_blocks == 6
    assert prefix.blocks[0] == tuple(full.table[0, :6])
    assert prefix.blocks[1] == (NULL_BLOCK,) * 4 + tuple(sliding.table[0, 4:6])
    # The given-back block 4 of the sliding group is handed to another: a shorter beginning is left.
    blocks.release(0)
    taken = sliding.manager.allocate(sliding.manager.num_free - 4)
    assert taken is not None
    assert blocks.find_prefix(hashes[:3]).num_blocks <= 3
    everything = sliding.manager.allocate(sliding.manager.num_free)
    assert everything is not None and blocks.find_prefix(hashes).num_blocks == 0


def test_a_shared_beginning_counts_once_and_comes_back_with_its_last_owner() -> None:
    blocks = tables(None)
    (group,) = blocks.groups
    hashes = hash_blocks(np.arange(8, dtype=np.int32), BLOCK_SIZE)
    admit(blocks, 0, [], 8)
    blocks.cover(0, 8)
    blocks.register(0, hashes, 8)
    assert admit(blocks, 1, hashes, 12) == 2
    assert group.manager.num_free == 17 and held(group, 0) == held(group, 1)
    blocks.release(0)
    assert group.manager.num_free == 17
    blocks.release(1)
    assert group.manager.num_free == 19
    assert blocks.find_prefix(hashes).num_blocks == 2
    blocks.forget_prefixes()
    assert blocks.find_prefix(hashes).num_blocks == 0


def test_admission_counts_what_others_were_promised() -> None:
    blocks = tables(None, num_blocks=11)
    nothing = blocks.find_prefix([])
    admit(blocks, 0, [], 24)
    blocks.cover(0, 4)
    running = np.array([True, False, False])
    # Ten blocks: one taken, five more promised, four left.
    assert blocks.can_admit(16, 16, nothing, running)
    assert not blocks.can_admit(17, 17, nothing, running)
    assert blocks.can_admit(36, 36, nothing, NOBODY)
    assert round(blocks.use, 6) == 0.1


def test_a_sequence_that_decodes_is_promised_a_window_and_no_chunk() -> None:
    """What a long chunk may need during prefill must not keep others out afterwards."""
    group = BlockGroup(24, BlockManager(16, 16), 4, 64, 2048)
    blocks = BlockTables([group])
    admit(blocks, 0, [], 124)
    running = np.array([True, False, False, False])
    nothing = blocks.find_prefix([])
    assert group.promised[0] == 8  # all of it: the chunk may be as long as the row
    assert blocks.cover(0, 64) and not blocks.can_admit(124, 124, nothing, running)
    blocks.slide(np.array([0]), np.array([64]))
    blocks.settle(np.array([0]))
    assert group.promised[0] == 3  # 24 positions touch three blocks of 16 at most
    assert blocks.can_admit(124, 64, nothing, running)
