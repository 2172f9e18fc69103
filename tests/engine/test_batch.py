"""A schedule laid out flat: every token at its position, block and draw."""

from __future__ import annotations

from typing import Any

import numpy as np
from fakes import request

from pipeline.engine.batch import StepInputs, build_inputs
from pipeline.engine.block_manager import BlockManager
from pipeline.engine.block_tables import BlockGroup, BlockTables
from pipeline.engine.philox import sequence_key, uniforms
from pipeline.engine.scheduler import Schedule
from pipeline.engine.sequence import SequenceTable, make_sequence

BLOCK_SIZE = 4


class Planned:
    """Prompts and the blocks they hold, given by hand; row r stands in slot r."""

    def __init__(self, *rows: tuple[list[int], list[int]], **params: Any) -> None:
        manager = BlockManager(16, BLOCK_SIZE)
        self.blocks = BlockTables([BlockGroup(None, manager, len(rows), 8, 32)])
        self.table = SequenceTable(len(rows))
        for row, (ids, blocks) in enumerate(rows):
            sequence = make_sequence(
                request(row, ids, **params),
                0,
                seed=3,
                max_model_len=100,
                eos_ids=(5, 6),
                matcher=None,
                block_hashes=[],
            )
            assert self.table.place(sequence) == row
            self.blocks.groups[0].table[row, : len(blocks)] = blocks
            self.blocks.num_blocks[row] = len(blocks)

    def plan(self, *rows: tuple[int, int, int, bool, bool]) -> StepInputs:
        """Rows of (slot, start, query_len, sampled, carried)."""
        slots, starts, lens, sampled, carried = (np.array(column) for column in zip(*rows, strict=True))
        schedule = Schedule(
            slots.astype(np.int32),
            self.table.epoch[slots].copy(),
            starts.astype(np.int32),
            lens.astype(np.int32),
            sampled,
            carried,
        )
        return build_inputs(schedule, self.table, self.blocks)


def test_rows_follow_each_other_without_padding() -> None:
    planned = Planned(([11, 12, 13, 14, 15, 16], [3, 7]), ([21, 22, 23], [5]))
    inputs = planned.plan((1, 2, 1, True, False), (0, 1, 5, True, False))
    assert inputs.input_ids.tolist() == [23, 12, 13, 14, 15, 16]
    assert inputs.positions.tolist() == [2, 1, 2, 3, 4, 5]
    assert inputs.groups[None].slot_mapping.tolist() == [
        5 * 4 + 2,
        3 * 4 + 1,
        3 * 4 + 2,
        3 * 4 + 3,
        7 * 4,
        7 * 4 + 1,
    ]
    assert inputs.logits_index.tolist() == [0, 5]
    assert inputs.groups[None].block_tables.tolist() == [[5, 0], [3, 7]]
    assert (inputs.starts.tolist(), inputs.query_lens.tolist()) == ([2, 1], [1, 5])
    assert inputs.num_tokens == 6
    assert inputs.sampling.slots.tolist() == [1, 0]


def test_a_chunk_that_does_not_end_the_prompt_samples_nothing() -> None:
    planned = Planned(([11, 12, 13, 14], [3]), ([21, 22], [5]))
    inputs = planned.plan((0, 0, 3, False, False), (1, 0, 2, True, False))
    assert inputs.logits_index.tolist() == [4]
    assert inputs.sampling.slots.tolist() == [1] and len(inputs.sampling.uniform) == 1


def test_carried_tokens_name_the_slot_that_holds_their_id() -> None:
    planned = Planned(([11, 12], [3]), ([21, 22, 23], [5]))
    inputs = planned.plan((0, 2, 1, True, True), (1, 0, 3, True, False))
    assert (inputs.carry_tokens.tolist(), inputs.carry_slots.tolist()) == ([0], [0])
    assert inputs.positions.tolist() == [2, 0, 1, 2]


def test_a_draw_belongs_to_the_row_and_the_number_of_its_token() -> None:
    planned = Planned(([11, 12], [3]), ([21, 22, 23], [5]))
    inputs = planned.plan((0, 2, 1, True, True), (1, 0, 3, True, False))
    keys = np.stack([sequence_key(3, 0, 0, 0), sequence_key(3, 0, 1, 0)])
    # Row 0 samples its second completion token, row 1 its first; the prompts' lengths do not count.
    assert inputs.sampling.uniform.tolist() == uniforms(keys, np.array([1, 0])).tolist()


def test_stop_ids_are_forbidden_until_min_tokens_are_there() -> None:
    planned = Planned(([11, 12], [3]), ([21, 22, 23], [5]), min_tokens=2, max_tokens=9)
    first = planned.plan((0, 0, 2, True, False), (1, 0, 3, True, False))
    assert first.sampling.forbidden.tolist() == [[0, 5], [0, 6], [1, 5], [1, 6]]
    second = planned.plan((0, 2, 1, True, True), (1, 3, 1, True, True))
    assert second.sampling.forbidden.tolist() == [[0, 5], [0, 6], [1, 5], [1, 6]]
    third = planned.plan((0, 3, 1, True, True), (1, 3, 1, True, True))
    assert third.sampling.forbidden.tolist() == [[1, 5], [1, 6]]


def test_sampling_parameters_are_those_of_the_sampled_rows() -> None:
    planned = Planned(([11], [1]), ([12], [2]), ([13], [3]))
    planned.table.temperature[:] = [0.1, 0.2, 0.3]
    planned.table.top_k[:] = [1, 2, 3]
    inputs = planned.plan((2, 0, 1, True, False), (1, 0, 1, False, False), (0, 0, 1, True, False))
    assert inputs.sampling.temperature.tolist() == np.array([0.3, 0.1], np.float32).tolist()
    assert inputs.sampling.top_k.tolist() == [3, 1]
    assert len(inputs.sampling.forbidden) == 0


def test_each_layer_group_has_places_of_its_own() -> None:
    """The sliding group has given back what lies behind its window; positions stay those of the row."""
    planned = Planned(([11] * 10, [3, 7, 8]))
    sliding = BlockGroup(4, BlockManager(16, BLOCK_SIZE), 1, 8, 32)
    sliding.table[0, :3] = [0, 9, 2]
    planned.blocks = BlockTables([*planned.blocks.groups, sliding])
    planned.blocks.num_blocks[0] = 3
    inputs = planned.plan((0, 8, 2, True, False))
    assert inputs.positions.tolist() == [8, 9]
    assert {w: g.slot_mapping.tolist() for w, g in inputs.groups.items()} == {None: [32, 33], 4: [8, 9]}
    assert inputs.groups[4].block_tables.tolist() == [[0, 9, 2]]
