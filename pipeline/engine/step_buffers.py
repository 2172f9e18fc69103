"""One step's inputs in one piece of memory: filled on the host, copied to the device at once.

A layout places every array of a step behind the other. The same layout serves a pinned host buffer,
seen as numpy arrays, and a device buffer, seen as tensors. Steps with prompt chunks come this way;
those of decoding rows only are made on the device (`slot_state.py`). Knows shapes and offsets; refuses to
know streams.

Shapes: T = tokens, R = rows, N = sampled rows, B = blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from pipeline.engine.batch import StepInputs

_ALIGNMENT = 16
_TORCH: dict[Any, torch.dtype] = {
    np.int64: torch.int64,
    np.int32: torch.int32,
    np.float32: torch.float32,
    np.float64: torch.float64,
}


@dataclass(frozen=True)
class StepLayout:
    """Where each array of a step of this size begins, in bytes. windows: of the layer groups."""

    num_tokens: int
    num_rows: int
    num_sampled: int
    blocks_per_row: int
    windows: tuple[int | None, ...]

    @cached_property
    def fields(self) -> dict[str, tuple[int, type, tuple[int, ...]]]:
        """By name: where the array begins, its numpy type, its shape."""
        t, r, n = self.num_tokens, self.num_rows, self.num_sampled
        shapes: list[tuple[str, type, tuple[int, ...]]] = [
            ("input_ids", np.int64, (t,)),
            ("positions", np.int64, (t,)),
            # Where the token's id lies on the device, for ids that the host does not know.
            ("carry_slots", np.int64, (t,)),
            ("logits_index", np.int64, (n,)),
            ("sample_slots", np.int64, (n,)),
            ("uniform", np.float64, (n,)),
            ("temperature", np.float32, (n,)),
            ("top_k", np.int32, (n,)),
            ("top_p", np.float32, (n,)),
            ("min_p", np.float32, (n,)),
            # Where each row's sequence slot stands after the step.
            ("slots", np.int64, (r,)),
            ("next_positions", np.int32, (r,)),
            ("context_lens", np.int32, (r,)),
            ("starts", np.int32, (r,)),
            ("query_start_loc", np.int32, (r + 1,)),
        ]
        for i in range(len(self.windows)):
            shapes.append((f"slot_mapping{i}", np.int64, (t,)))
            shapes.append((f"block_tables{i}", np.int32, (r, self.blocks_per_row)))
        fields, offset = {}, 0
        for name, kind, shape in shapes:
            fields[name] = (offset, kind, shape)
            offset += -(-_num_bytes(kind, shape) // _ALIGNMENT) * _ALIGNMENT
        return fields

    @property
    def num_bytes(self) -> int:
        return max(offset + _num_bytes(kind, shape) for offset, kind, shape in self.fields.values())

    def arrays(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Views of a host buffer uint8 [>= num_bytes]."""
        views: dict[str, np.ndarray] = {}
        for name, (offset, kind, shape) in self.fields.items():
            views[name] = buffer[offset : offset + _num_bytes(kind, shape)].view(kind).reshape(shape)
        return views

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of a device buffer uint8 [>= num_bytes]."""
        views = {}
        for name, (offset, kind, shape) in self.fields.items():
            views[name] = buffer[offset : offset + _num_bytes(kind, shape)].view(_TORCH[kind]).view(shape)
        return views


def _num_bytes(kind: type, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * np.dtype(kind).itemsize


@lru_cache(maxsize=256)
def layout_of(
    num_tokens: int,
    num_rows: int,
    num_sampled: int,
    blocks_per_row: int,
    windows: tuple[int | None, ...],
) -> StepLayout:
    """The layout of this size; under bitwise determinism the same are asked for again and again."""
    return StepLayout(num_tokens, num_rows, num_sampled, blocks_per_row, windows)


def fill(
    views: dict[str, np.ndarray], inputs: StepInputs, windows: Sequence[int | None], scratch_slot: int
) -> None:
    """Write a step into a layout at least as large; what is left over becomes padding.

    Padding tokens read and write nothing: their K/V slot is negative, their context empty, and what
    is sampled for them goes to scratch_slot, a sequence slot that nobody has.
    """
    t, r, n = inputs.num_tokens, len(inputs.starts), len(inputs.logits_index)
    sampling = inputs.sampling
    _put(views["input_ids"], inputs.input_ids, t, 0)
    _put(views["positions"], inputs.positions, t, 0)
    # -1 where the id is the host's own; the graph reads it as "keep".
    views["carry_slots"].fill(-1)
    views["carry_slots"][inputs.carry_tokens] = inputs.carry_slots
    _put(views["logits_index"], inputs.logits_index, n, 0)
    _put(views["sample_slots"], sampling.slots, n, scratch_slot)
    _put(views["uniform"], sampling.uniform, n, 0.0)
    _put(views["temperature"], sampling.temperature, n, 0.0)
    _put(views["top_k"], sampling.top_k, n, 0)
    _put(views["top_p"], sampling.top_p, n, 1.0)
    _put(views["min_p"], sampling.min_p, n, 0.0)
    _put(views["slots"], inputs.slots, r, scratch_slot)
    _put(views["next_positions"], inputs.starts + inputs.query_lens, r, 0)
    _put(views["context_lens"], inputs.starts + inputs.query_lens, r, 0)
    _put(views["starts"], inputs.starts, r, 0)
    np.cumsum(inputs.query_lens, out=views["query_start_loc"][1 : r + 1])
    views["query_start_loc"][0] = 0
    views["query_start_loc"][r + 1 :] = t
    for i, window in enumerate(windows):
        group = inputs.groups[window]
        _put(views[f"slot_mapping{i}"], group.slot_mapping, t, -1)
        views[f"block_tables{i}"][:r, : group.block_tables.shape[1]] = group.block_tables


def _put(view: np.ndarray, values: np.ndarray, count: int, padding: float) -> None:
    view[:count] = values
    view[count:] = padding
