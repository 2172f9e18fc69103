"""A decode step's inputs, made on the device from what it knows of every sequence slot.

One program a row looks up its slot's words (`engine/slot_state.py` says what they are), writes the row's
id, position, lengths, KV place, block table, sampling parameters and random number, and moves the slot on
by one position. The random number is Philox4x32-10 as in `engine/philox.py`, to the bit.

Shapes: S = sequence slots, W = words of a slot, R = rows, padding included, G = layer groups, B = blocks of
the longest sequence.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.random import philox_impl

_COLUMNS_AT_ONCE = 64


@dataclass(frozen=True)
class SlotState:
    """words: int32 [S + 1, W]. last_ids: int64 [S + 1], the id last sampled for each slot. rows: int32 [at
    least R], the slot of each row of the step; S is nobody's, and stands for padding."""

    words: torch.Tensor
    last_ids: torch.Tensor
    rows: torch.Tensor

    @property
    def num_slots(self) -> int:
        return self.words.shape[0] - 1


@dataclass(frozen=True)
class DecodeInputs:
    """What a decode step reads, one entry a row.

    input_ids, positions, sample_slots int64 [R]; context_lens, starts int32 [R]; query_start_loc int32
    [R + 1] (0, 1, 2, ...); temperature, top_p, min_p float32 [R]; top_k int32 [R]; uniform float64 [R];
    slot_mapping int64 [G, R]; block_tables int32 [G, R, B]. A row of padding has no context, writes no K/V
    and is greedy.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    sample_slots: torch.Tensor
    context_lens: torch.Tensor
    starts: torch.Tensor
    query_start_loc: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor

    def first(self, num_rows: int) -> DecodeInputs:
        """The inputs of a smaller step, in the same memory."""
        by_group = {name: getattr(self, name)[:, :num_rows] for name in ("slot_mapping", "block_tables")}
        by_row = {
            field.name: getattr(self, field.name)[:num_rows]
            for field in dataclasses.fields(self)
            if field.name not in by_group
        }
        by_row["query_start_loc"] = self.query_start_loc[: num_rows + 1]
        return DecodeInputs(**by_row, **by_group)


def allocate_decode_inputs(
    num_rows: int, num_groups: int, blocks_per_row: int, device: torch.device
) -> DecodeInputs:
    """Inputs of steps of up to num_rows rows, everything zero."""

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    n = num_rows
    return DecodeInputs(
        input_ids=zeros(n, dtype=torch.int64),
        positions=zeros(n, dtype=torch.int64),
        sample_slots=zeros(n, dtype=torch.int64),
        context_lens=zeros(n, dtype=torch.int32),
        starts=zeros(n, dtype=torch.int32),
        query_start_loc=torch.arange(n + 1, dtype=torch.int32, device=device),
        temperature=zeros(n, dtype=torch.float32),
        top_k=zeros(n, dtype=torch.int32),
        top_p=zeros(n, dtype=torch.float32),
        min_p=zeros(n, dtype=torch.float32),
        uniform=zeros(n, dtype=torch.float64),
        slot_mapping=zeros(num_groups, n, dtype=torch.int64),
        block_tables=zeros(num_groups, n, blocks_per_row, dtype=torch.int32),
    )


@triton.jit
def _decode_inputs_kernel(
    words_ptr: tl.tensor,
    last_ids_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    sample_slots_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    num_slots: tl.tensor,
    num_words: tl.tensor,
    blocks_per_row: tl.tensor,
    stride_mapping: tl.tensor,
    stride_group: tl.tensor,
    stride_table: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    HEADER: tl.constexpr,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(rows_ptr + row)
    live = slot < num_slots
    words = words_ptr + slot.to(tl.int64) * num_words
    position = tl.where(live, tl.load(words), 0)
    tl.store(words, position + 1, mask=live)
    # An id that the host gave counts once.
    given = tl.load(words + 8)
    tl.store(input_ids_ptr + row, tl.where(live & (given >= 0), given, tl.load(last_ids_ptr + slot)))
    tl.store(words + 8, -1, mask=live)
    tl.store(positions_ptr + row, position.to(tl.int64))
    tl.store(sample_slots_ptr + row, slot.to(tl.int64))
    tl.store(context_lens_ptr + row, tl.where(live, position + 1, 0))
    tl.store(starts_ptr + row, position)
    one = tl.full([], 1.0, tl.float32)
    temperature = tl.load(words + 2).to(tl.float32, bitcast=True)
    tl.store(temperature_ptr + row, tl.where(live, temperature, 0.0))
    tl.store(top_k_ptr + row, tl.where(live, tl.load(words + 3), 0))
    tl.store(top_p_ptr + row, tl.where(live, tl.load(words + 4).to(tl.float32, bitcast=True), one))
    tl.store(min_p_ptr + row, tl.where(live, tl.load(words + 5).to(tl.float32, bitcast=True), 0.0))
    # Which of the completion's tokens is drawn is the counter; the other three words of it are 0.
    counter = (position + 1 - tl.load(words + 1)).to(tl.uint32)
    zero = tl.zeros_like(counter)
    key_0 = tl.load(words + 6).to(tl.uint32, bitcast=True)
    key_1 = tl.load(words + 7).to(tl.uint32, bitcast=True)
    word_0, word_1, _, _ = philox_impl(counter, zero, zero, zero, key_0, key_1, 10)
    bits = (word_0.to(tl.uint64) << 21) | (word_1.to(tl.uint64) >> 11)
    tl.store(uniform_ptr + row, bits.to(tl.float64) * (1.0 / 9007199254740992.0))
    entry = position // PAGE
    column = tl.arange(0, COLUMNS)
    for group in tl.static_range(NUM_GROUPS):
        table = words + HEADER + group * blocks_per_row
        place = tl.load(table + entry).to(tl.int64) * PAGE + position % PAGE
        tl.store(slot_mapping_ptr + group * stride_mapping + row, tl.where(live, place, -1))
        target = tables_ptr + group * stride_group + row.to(tl.int64) * stride_table
        # Entries behind the row's last block are never read.
        for begin in range(0, tl.where(live, entry + 1, 0), COLUMNS):
            mask = begin + column <= entry
            tl.store(target + begin + column, tl.load(table + begin + column, mask=mask), mask=mask)


def make_decode_inputs(state: SlotState, out: DecodeInputs, page_size: int, header_words: int) -> None:
    """Fill `out` for the rows state.rows[:R] and move their slots on by one position."""
    num_rows, (num_groups, _, blocks_per_row) = len(out.input_ids), out.block_tables.shape
    assert state.words.is_contiguous() and out.slot_mapping.stride(1) == out.block_tables.stride(2) == 1
    assert state.words.shape[1] == header_words + num_groups * blocks_per_row
    _decode_inputs_kernel[(num_rows,)](
        state.words,
        state.last_ids,
        state.rows,
        out.input_ids,
        out.positions,
        out.sample_slots,
        out.context_lens,
        out.starts,
        out.temperature,
        out.top_k,
        out.top_p,
        out.min_p,
        out.uniform,
        out.slot_mapping,
        out.block_tables,
        state.num_slots,
        state.words.shape[1],
        blocks_per_row,
        out.slot_mapping.stride(0),
        out.block_tables.stride(0),
        out.block_tables.stride(1),
        NUM_GROUPS=num_groups,
        HEADER=header_words,
        PAGE=page_size,
        COLUMNS=_COLUMNS_AT_ONCE,
        num_warps=1,
    )
