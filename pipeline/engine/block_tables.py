"""Which blocks every sequence slot holds, in every layer group.

Layers that see the same stretch of the past share a layer group: all full-attention layers one,
all layers with a sliding window of w positions another. A group has block numbers and memory of
its own, so that a sliding group keeps a window of each sequence only: blocks that fall behind it
are given back while the sequence grows. Pure Python and numpy.

Shapes: S = sequence slots, B = blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.engine.block_manager import NULL_BLOCK, BlockManager


@dataclass(frozen=True)
class SharedPrefix:
    """A beginning that is in memory already: num_blocks of it, and which blocks, for each group.

    A sliding group has NULL_BLOCK for what lies behind its window.
    """

    num_blocks: int
    blocks: tuple[tuple[int, ...], ...]


class BlockGroup:
    """One layer group. window: positions a query sees, itself included; None sees all.

    table: int32 [S, B], the block of each stretch of block_size positions. first: int32 [S], how
    many leading entries were given back. promised: int32 [S], blocks set aside at admission.
    """

    def __init__(
        self,
        window: int | None,
        manager: BlockManager,
        num_slots: int,
        blocks_per_sequence: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.window = window
        self.manager = manager
        self.table = np.full((num_slots, blocks_per_sequence), NULL_BLOCK, np.int32)
        self.first = np.zeros(num_slots, np.int32)
        self.promised = np.zeros(num_slots, np.int32)
        self._longest_chunk = max_num_batched_tokens

    def needed(self, num_tokens: int, chunk: int) -> int:
        """Blocks that a sequence of num_tokens holds at most, while it computes up to `chunk` at a time."""
        blocks = self.manager.blocks_for(num_tokens)
        if self.window is None:
            return blocks
        # A window that begins and ends inside a block, and the chunk behind it.
        window_and_chunk = self.window - 1 + min(chunk, self._longest_chunk)
        return min(blocks, self.manager.blocks_for(window_and_chunk) + 1)

    def first_visible(self, num_tokens: int) -> int:
        """The first block that position num_tokens, or any after it, can see."""
        if self.window is None:
            return 0
        return max(num_tokens - self.window + 1, 0) // self.manager.block_size


class BlockTables:
    """The groups together: a position is in memory when every group has it."""

    def __init__(self, groups: Sequence[BlockGroup]) -> None:
        assert groups
        self.groups = tuple(groups)
        self.block_size = groups[0].manager.block_size
        # Entries of each slot's tables, the same in all groups.
        self.num_blocks = np.zeros(len(groups[0].first), np.int32)
        self._sliding = [group for group in groups if group.window is not None]

    @property
    def use(self) -> float:
        """Share of the blocks owned, in the group that is fullest."""
        return max(1 - g.manager.num_free / g.manager.capacity for g in self.groups)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens has room when it is alone."""
        return all(group.needed(num_tokens, num_tokens) <= group.manager.capacity for group in self.groups)

    # ---------------------------------------------------------------- admission

    def find_prefix(self, hashes: Sequence[bytes]) -> SharedPrefix:
        """The longest run of blocks, from the first, that every group still has what it needs of."""
        runs = [g.manager.find_prefix(hashes) for g in self.groups if g.window is None]
        count = min((len(run) for run in runs), default=len(hashes))
        held = [[g.manager.find(digest) for digest in hashes[:count]] for g in self.groups]
        while count and not all(
            self._window_held(g, h, count) for g, h in zip(self.groups, held, strict=True)
        ):
            count -= 1
        blocks = []
        for group, found in zip(self.groups, held, strict=True):
            hidden = min(group.first_visible(count * self.block_size), count)
            blocks.append((NULL_BLOCK,) * hidden + tuple(b for b in found[hidden:count] if b is not None))
        return SharedPrefix(count, tuple(blocks))

    def _window_held(self, group: BlockGroup, held: list[int | None], count: int) -> bool:
        return all(block is not None for block in held[group.first_visible(count * self.block_size) : count])

    def can_admit(self, num_tokens: int, num_known: int, prefix: SharedPrefix, running: np.ndarray) -> bool:
        """Whether free memory, less what running slots were promised, covers num_tokens more.

        num_known: those of them to be computed in chunks; the others come one by one.
        """
        for group, shared in zip(self.groups, prefix.blocks, strict=True):
            live = [block for block in shared if block != NULL_BLOCK]
            taken = group.needed(num_tokens, num_known) - len(live) + group.manager.num_unowned(live)
            held = self.num_blocks - group.first
            outstanding = int(np.maximum(group.promised - held, 0)[running].sum())
            if taken > group.manager.num_free - outstanding:
                return False
        return True

    def admit(self, slot: int, num_tokens: int, num_known: int, prefix: SharedPrefix) -> None:
        """Give an empty slot its shared beginning, and a promise of blocks for num_tokens."""
        self.num_blocks[slot] = prefix.num_blocks
        for group, shared in zip(self.groups, prefix.blocks, strict=True):
            live = [block for block in shared if block != NULL_BLOCK]
            group.manager.share(live)
            group.table[slot, : len(shared)] = shared
            group.first[slot] = len(shared) - len(live)
            group.promised[slot] = group.needed(num_tokens, num_known)

    # ---------------------------------------------------------------- growth

    def cover(self, slot: int, num_tokens: int) -> bool:
        """Let the slot's blocks cover num_tokens positions; False, and nothing taken, if too few are free."""
        held = int(self.num_blocks[slot])
        missing = -(-num_tokens // self.block_size) - held
        if missing <= 0:
            return True
        if any(missing > group.manager.num_free for group in self.groups):
            return False
        for group in self.groups:
            taken = group.manager.allocate(missing)
            assert taken is not None
            group.table[slot, held : held + missing] = taken
        self.num_blocks[slot] = held + missing
        return True

    def settle(self, slots: np.ndarray) -> None:
        """Slots that go on token by token need no room for a chunk any more."""
        for group in self._sliding:
            assert group.window is not None
            least = group.manager.blocks_for(group.window) + 1
            group.promised[slots] = np.minimum(group.promised[slots], least)

    def slide(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Give back what lies behind the window of the slots' next positions.

        Steps already launched may still read there; whoever is given these blocks writes them in a
        later step.
        """
        for group in self._sliding:
            assert group.window is not None
            visible = np.maximum(positions - group.window + 1, 0) // self.block_size
            behind = visible > group.first[slots]
            for slot, stop in zip(slots[behind].tolist(), visible[behind].tolist(), strict=True):
                start = int(group.first[slot])
                group.manager.free(group.table[slot, start:stop].tolist())
                group.table[slot, start:stop] = NULL_BLOCK
                group.first[slot] = stop

    def register(self, slot: int, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Name the slot's full blocks below num_tokens by their hashes, for others to share."""
        full = min(num_tokens // self.block_size, len(hashes))
        for group in self.groups:
            for i in range(int(group.first[slot]), full):
                group.manager.register(int(group.table[slot, i]), hashes[i])

    def release(self, slot: int) -> None:
        """Give up all the slot has and was promised."""
        held = int(self.num_blocks[slot])
        for group in self.groups:
            group.manager.free(group.table[slot, group.first[slot] : held].tolist())
            group.table[slot, :held] = NULL_BLOCK
            group.first[slot] = group.promised[slot] = 0
        self.num_blocks[slot] = 0

    def forget_prefixes(self) -> None:
        for group in self.groups:
            group.manager.forget_prefixes()
