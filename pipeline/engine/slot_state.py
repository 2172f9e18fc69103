"""What the device knows of every sequence slot, mirrored on the host: so only differences travel.

A decode step needs of each row its position, where its blocks lie and how it is sampled. All of it lies
on the device, a row of 32-bit words per sequence slot, and the device itself moves the positions on. The
mirror tells what a step changes: rows that are new, blocks that were added, another order. A step of the
same rows whose last blocks have room sends nothing. Pure numpy; refuses to know torch.

Shapes: S = sequence slots, R = rows of a step, P = rows it is padded to, W = words of a slot, G = layer
groups, B = blocks of the longest sequence, U = slots sent whole, A = single blocks sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.engine.batch import StepInputs

# Words of a slot before its block tables; floats and the two key words are kept as their bits.
POSITION, NUM_PROMPT, TEMPERATURE, TOP_K, TOP_P, MIN_P, KEY_0, KEY_1, GIVEN_ID = range(9)
HEADER_WORDS = 9
NO_ID = -1


def words_per_slot(num_groups: int, blocks_per_row: int) -> int:
    return HEADER_WORDS + num_groups * blocks_per_row


@dataclass(frozen=True)
class StateChanges:
    """What a decode step must send first.

    rows: int32 [P], each row's slot, S for padding; None if they are as in the last decode step. slots
    int32 [U] and words int32 [U, W]: slots that are sent whole. places int32 [A]: flat places in the
    words [S + 1, W], of the blocks int32 [A].
    """

    rows: np.ndarray | None
    slots: np.ndarray
    words: np.ndarray
    places: np.ndarray
    blocks: np.ndarray

    @property
    def any(self) -> bool:
        return self.rows is not None or len(self.slots) > 0 or len(self.places) > 0

    @property
    def num_words(self) -> int:
        """32-bit words that travel."""
        rows = 0 if self.rows is None else len(self.rows)
        return rows + len(self.slots) + self.words.size + 2 * len(self.places)


class SlotMirror:
    """The host's copy of what was sent. `changes` and `advance` must be called in the order of the steps."""

    def __init__(self, num_slots: int, num_groups: int, blocks_per_row: int) -> None:
        self.num_slots = num_slots
        self._blocks_per_row = blocks_per_row
        self._num_words = words_per_slot(num_groups, blocks_per_row)
        # Epochs begin at 0: -1 says that a slot was never sent.
        self._epoch = np.full(num_slots, -1, np.int64)
        self._position = np.zeros(num_slots, np.int32)
        self._num_blocks = np.zeros(num_slots, np.int32)
        self._rows = np.empty(0, np.int32)

    def forget(self) -> None:
        """The device's state is lost or unknown: the next step sends everything it needs."""
        self._epoch[:] = -1
        self._rows = np.empty(0, np.int32)

    def changes(self, inputs: StepInputs, padded: int) -> StateChanges:
        """What the device lacks for this step of decoding rows; counts as sent from now on."""
        slots = inputs.slots
        rows = np.full(padded, self.num_slots, np.int32)
        rows[: len(slots)] = slots
        same_rows = np.array_equal(rows, self._rows)
        stale = (self._epoch[slots] != inputs.epochs) | (self._position[slots] != inputs.starts)
        whole = np.flatnonzero(stale)
        grown = np.flatnonzero(~stale & (self._num_blocks[slots] < inputs.num_blocks))
        places, blocks = self._added_blocks(inputs, grown)
        self._rows = rows
        self._epoch[slots] = inputs.epochs
        self._num_blocks[slots] = inputs.num_blocks
        self._position[slots] = inputs.starts + 1
        return StateChanges(
            None if same_rows else rows, slots[whole], self._words(inputs, whole), places, blocks
        )

    def advance(self, inputs: StepInputs) -> np.ndarray:
        """A step with prompt chunks moves positions too: int32 [R], where each row's slot stands after it."""
        self._position[inputs.slots] = inputs.starts + inputs.query_lens
        return self._position[inputs.slots]

    def _words(self, inputs: StepInputs, which: np.ndarray) -> np.ndarray:
        """int32 [U, W] of the rows `which` of a step in which every row is sampled."""
        words = np.zeros((len(which), self._num_words), np.int32)
        if not len(which):
            return words
        sampling = inputs.sampling
        words[:, POSITION] = inputs.starts[which]
        words[:, NUM_PROMPT] = inputs.starts[which] + 1 - sampling.draws.numbers[which]
        words[:, TOP_K] = sampling.top_k[which]
        for column, values in (
            (TEMPERATURE, sampling.temperature),
            (TOP_P, sampling.top_p),
            (MIN_P, sampling.min_p),
        ):
            words[:, column] = values[which].view(np.int32)
        words[:, KEY_0 : KEY_1 + 1] = sampling.draws.keys[which].view(np.int32)
        # The id to compute, where the host has it; else it is the last one sampled for the slot.
        given = inputs.input_ids.astype(np.int32)
        given[inputs.carry_tokens] = NO_ID
        words[:, GIVEN_ID] = given[which]
        for group, begin in self._tables(inputs):
            words[:, begin : begin + group.shape[1]] = group[which]
        return words

    def _added_blocks(self, inputs: StepInputs, grown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """places and blocks [A] of entries that the rows `grown` have and the device does not."""
        if not len(grown):
            return np.empty(0, np.int32), np.empty(0, np.int32)
        before = self._num_blocks[inputs.slots[grown]]
        added = inputs.num_blocks[grown] - before
        rows = np.repeat(grown, added)
        first_of_row = np.repeat(np.cumsum(added) - added, added)
        columns = np.repeat(before, added) + np.arange(len(rows)) - first_of_row
        at = inputs.slots[rows].astype(np.int64) * self._num_words + columns
        places = np.concatenate([at + begin for _, begin in self._tables(inputs)])
        blocks = np.concatenate([group[rows, columns] for group, _ in self._tables(inputs)])
        return places.astype(np.int32), blocks.astype(np.int32)

    def _tables(self, inputs: StepInputs) -> list[tuple[np.ndarray, int]]:
        """Each group's block tables [R, held], and the word they begin at."""
        return [
            (group.block_tables, HEADER_WORDS + number * self._blocks_per_row)
            for number, group in enumerate(inputs.groups.values())
        ]
