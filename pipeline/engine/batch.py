"""A planned step as the arrays that the device reads.

Knows how a schedule and the sequence table become flat inputs without padding between rows;
refuses to know torch. Everything is numpy and vectorised over the rows.

Shapes: R = rows (sequences), T = tokens of all rows, N = sampled rows, S = sequence slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.engine.philox import uniforms
from pipeline.engine.scheduler import Schedule
from pipeline.engine.sequence import SequenceTable


@dataclass(frozen=True)
class SamplingInputs:
    """Per sampled row, all [N]. slots: int32, where the sampled id is kept for the next step.

    uniform: float64 in [0, 1), the row's draw. forbidden: int64 [M, 2], pairs (row, id) that may not
    be sampled yet because of min_tokens.
    """

    slots: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray
    forbidden: np.ndarray


@dataclass(frozen=True)
class StepInputs:
    """One step. Rows follow each other in the flat token arrays.

    input_ids, positions: int64 [T]; slot_mapping: int64 [T], the KV position (block * block_size +
    offset) each token writes. carry_tokens, carry_slots: int64 [C], flat tokens whose id is the
    last one sampled for that sequence slot, still on the device. starts, query_lens: int32 [R];
    block_tables: int32 [R, B]. logits_index: int64 [N], the flat token each sampled row ends at.
    """

    input_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    carry_tokens: np.ndarray
    carry_slots: np.ndarray
    starts: np.ndarray
    query_lens: np.ndarray
    block_tables: np.ndarray
    logits_index: np.ndarray
    sampling: SamplingInputs

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


def build_inputs(schedule: Schedule, table: SequenceTable, block_size: int) -> StepInputs:
    """Lay a schedule out flat."""
    slots, starts, lens = schedule.slots, schedule.starts, schedule.query_lens
    ends = np.cumsum(lens)
    row_of_token = np.repeat(np.arange(len(slots)), lens)
    positions = starts[row_of_token] + np.arange(ends[-1]) - np.repeat(ends - lens, lens)
    token_slots = slots[row_of_token]
    blocks = table.block_tables[token_slots, positions // block_size]
    carried = np.flatnonzero(schedule.carried)
    held = int(table.num_blocks[slots].max())
    return StepInputs(
        input_ids=table.tokens[token_slots, positions].astype(np.int64),
        positions=positions.astype(np.int64),
        slot_mapping=blocks.astype(np.int64) * block_size + positions % block_size,
        carry_tokens=(ends - 1)[carried].astype(np.int64),
        carry_slots=slots[carried].astype(np.int64),
        starts=starts,
        query_lens=lens,
        block_tables=table.block_tables[slots, :held],
        logits_index=(ends - 1)[schedule.sampled].astype(np.int64),
        sampling=_sampling_inputs(schedule, table),
    )


def _sampling_inputs(schedule: Schedule, table: SequenceTable) -> SamplingInputs:
    rows = np.flatnonzero(schedule.sampled)
    slots = schedule.slots[rows]
    length = schedule.starts[rows] + schedule.query_lens[rows]
    too_early = np.flatnonzero(length < table.min_length[slots])
    stop_ids = table.stop_ids[slots[too_early]]
    early_row, column = np.nonzero(stop_ids >= 0)
    return SamplingInputs(
        slots=slots.astype(np.int64),
        temperature=table.temperature[slots],
        top_k=table.top_k[slots],
        top_p=table.top_p[slots],
        min_p=table.min_p[slots],
        uniform=uniforms(table.philox_keys[slots], length - table.num_prompt[slots]),
        forbidden=np.stack([too_early[early_row], stop_ids[early_row, column]], axis=1).astype(np.int64),
    )
