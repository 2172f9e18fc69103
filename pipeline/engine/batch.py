"""A planned step as the arrays that the device reads.

Knows how a schedule and the sequence table become flat inputs without padding between rows;
refuses to know torch. Everything is numpy and vectorised over the rows.

Shapes: R = rows (sequences), T = tokens of all rows, N = sampled rows, B = blocks of the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.engine.block_tables import BlockTables
from pipeline.engine.sampling_inputs import SamplingInputs, build_sampling_inputs
from pipeline.engine.scheduler import Schedule
from pipeline.engine.sequence import SequenceTable


@dataclass(frozen=True)
class GroupInputs:
    """Where one layer group's keys and values lie. slot_mapping: int64 [T], the KV position (block *
    block_size + offset) each token writes. block_tables: int32 [R, B]."""

    slot_mapping: np.ndarray
    block_tables: np.ndarray


@dataclass(frozen=True)
class StepInputs:
    """One step. Rows follow each other in the flat token arrays.

    slots int32, epochs int64, num_blocks int32 [R]: each row's sequence slot, the slot's epoch, its blocks.
    input_ids, positions: int64 [T]. carry_tokens, carry_slots: int64 [C], flat tokens whose id is
    the last one sampled for that sequence slot, still on the device. starts, query_lens: int32 [R].
    groups: by the layer group's sliding window. logits_index: int64 [N], the flat token each sampled
    row ends at.
    """

    slots: np.ndarray
    epochs: np.ndarray
    num_blocks: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    carry_tokens: np.ndarray
    carry_slots: np.ndarray
    starts: np.ndarray
    query_lens: np.ndarray
    groups: dict[int | None, GroupInputs]
    logits_index: np.ndarray
    sampling: SamplingInputs

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


def build_inputs(schedule: Schedule, table: SequenceTable, blocks: BlockTables) -> StepInputs:
    """Lay a schedule out flat."""
    slots, starts, lens = schedule.slots, schedule.starts, schedule.query_lens
    ends = np.cumsum(lens)
    row_of_token = np.repeat(np.arange(len(slots)), lens)
    positions = starts[row_of_token] + np.arange(ends[-1]) - np.repeat(ends - lens, lens)
    token_slots = slots[row_of_token]
    carried = np.flatnonzero(schedule.carried)
    num_blocks = blocks.num_blocks[slots]
    held = int(num_blocks.max())
    entry, offset = positions // blocks.block_size, positions % blocks.block_size
    return StepInputs(
        slots=slots,
        epochs=schedule.epochs,
        num_blocks=num_blocks,
        input_ids=table.tokens[token_slots, positions].astype(np.int64),
        positions=positions.astype(np.int64),
        carry_tokens=(ends - 1)[carried].astype(np.int64),
        carry_slots=slots[carried].astype(np.int64),
        starts=starts,
        query_lens=lens,
        groups={
            group.window: GroupInputs(
                group.table[token_slots, entry].astype(np.int64) * blocks.block_size + offset,
                group.table[slots, :held],
            )
            for group in blocks.groups
        },
        logits_index=(ends - 1)[schedule.sampled].astype(np.int64),
        sampling=build_sampling_inputs(schedule, table),
    )
