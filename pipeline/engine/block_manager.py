"""Who owns which block of KV memory, and which blocks hold a prefix that others can share.

Knows block numbers, reference counts and hashes; refuses to know tensors, sequences and steps.
Pure Python and numpy, so the policy is tested in milliseconds.

A block holds `block_size` KV positions. Block 0 is the null block: padding writes there, nobody
owns it. A freed block that holds a registered prefix stays findable until it is handed out again,
oldest first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

NULL_BLOCK = 0


def hash_blocks(
    tokens: np.ndarray, block_size: int, chain: Sequence[bytes] = (), stop: int | None = None
) -> list[bytes]:
    """Hash every full block of tokens int32 [P], each over itself and all before it.

    chain: hashes already known, extended. stop: hash only blocks before this one. Equal hashes
    mean equal prefixes: 128 bits of BLAKE2b, so that sharing by accident is out of reach.
    """
    hashes = list(chain)
    full = len(tokens) // block_size if stop is None else min(len(tokens) // block_size, stop)
    parent = hashes[-1] if hashes else b""
    for i in range(len(hashes), full):
        block = np.ascontiguousarray(tokens[i * block_size : (i + 1) * block_size], np.int32)
        parent = hashlib.blake2b(parent + block.tobytes(), digest_size=16).digest()
        hashes.append(parent)
    return hashes


class BlockManager:
    """Hands out blocks 1 … num_blocks - 1; share, free and register keep the prefix cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"engine.num_blocks={num_blocks} leaves no usable block: use 2 or more")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = np.zeros(num_blocks, np.int32)
        # Insertion order is age: the left end was freed longest ago and is handed out first.
        self._free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(1, num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def capacity(self) -> int:
        """Blocks that can be owned at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest run of blocks that hold these hashes, from the first on."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, digest: bytes) -> int | None:
        """The block that holds this full block of tokens and all before it, if any does."""
        return self._block_of.get(digest)

    def num_unowned(self, blocks: Sequence[int]) -> int:
        """How many of these are free at present: sharing them takes them from the free ones."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """Take count blocks, or none at all if fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
            self._references[block] = 1
        return blocks

    def register(self, block: int, digest: bytes) -> None:
        """Let others find this full block; the first holder of a prefix keeps the name."""
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def forget_prefixes(self) -> None:
        """Take all names away: nothing that lies in the blocks is found again."""
        self._block_of.clear()
        self._hash_of.clear()

    def free(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each. Last first, so that a prefix outlives its continuation."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was freed twice"
            if self._references[block] == 0:
                self._free[block] = None
