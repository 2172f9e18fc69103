"""A step in one piece of memory: every array is where both sides look for it, and padding does nothing."""

from __future__ import annotations

import numpy as np
import torch
from fakes import FixedDraws

from pipeline.engine.batch import GroupInputs, StepInputs
from pipeline.engine.sampling_inputs import SamplingInputs
from pipeline.engine.step_buffers import fill, layout_of

SCRATCH = 9


def step(rows: int = 3) -> StepInputs:
    """Decoding rows: row 1 gets its id from the device."""
    count = np.arange(rows)
    return StepInputs(
        slots=(count + 3).astype(np.int32),
        epochs=np.zeros(rows, np.int64),
        num_blocks=np.full(rows, 2, np.int32),
        input_ids=count + 50,
        positions=count + 20,
        carry_tokens=np.array([1]),
        carry_slots=np.array([4]),
        starts=(count + 20).astype(np.int32),
        query_lens=np.ones(rows, np.int32),
        groups={
            None: GroupInputs(count + 100, np.stack([count, count + 1], axis=1).astype(np.int32)),
            8: GroupInputs(count + 200, np.stack([count + 2, count + 3], axis=1).astype(np.int32)),
        },
        logits_index=count,
        sampling=SamplingInputs(
            slots=count + 3,
            temperature=np.full(rows, 0.5, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            min_p=np.zeros(rows, np.float32),
            draws=FixedDraws(np.linspace(0.1, 0.9, rows)),
            forbidden=np.empty((0, 2), np.int64),
        ),
    )


def test_both_sides_see_the_same_arrays() -> None:
    layout = layout_of(3, 3, 3, 2, (None, 8))
    buffer = np.zeros(layout.num_bytes, np.uint8)
    fill(layout.arrays(buffer), step(), (None, 8), SCRATCH)
    tensors = layout.tensors(torch.from_numpy(buffer))
    for name, array in layout.arrays(buffer).items():
        assert tensors[name].tolist() == array.tolist(), name
    assert tensors["input_ids"].tolist() == [50, 51, 52]
    assert tensors["carry_slots"].tolist() == [-1, 4, -1]
    assert tensors["context_lens"].tolist() == [21, 22, 23]
    assert tensors["query_start_loc"].tolist() == [0, 1, 2, 3]
    assert tensors["slot_mapping1"].tolist() == [200, 201, 202]
    assert tensors["block_tables1"].tolist() == [[2, 3], [3, 4], [4, 5]]
    assert tensors["uniform"].tolist() == [0.1, 0.5, 0.9]


def test_arrays_do_not_overlap_and_are_aligned() -> None:
    layout = layout_of(5, 3, 2, 7, (None, 8))
    spans = sorted(
        (offset, offset + int(np.prod(shape)) * np.dtype(kind).itemsize)
        for offset, kind, shape in layout.fields.values()
    )
    assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
    assert all(begin % 16 == 0 for begin, _ in spans)


def test_padding_reads_writes_and_samples_nothing() -> None:
    layout = layout_of(8, 8, 8, 4, (None, 8))
    # What a larger step left behind must not show.
    buffer = np.full(layout.num_bytes, 255, np.uint8)
    views = layout.arrays(buffer)
    fill(views, step(), (None, 8), SCRATCH)
    for group in (0, 1):
        assert (views[f"slot_mapping{group}"][3:] == -1).all()
    assert (views["context_lens"][3:] == 0).all()
    assert (views["sample_slots"][3:] == SCRATCH).all()
    assert (views["carry_slots"][3:] == -1).all()
    assert (views["temperature"][3:] == 0).all()
    assert views["query_start_loc"].tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]


def test_a_layout_is_made_once() -> None:
    assert layout_of(8, 8, 8, 4, (None,)) is layout_of(8, 8, 8, 4, (None,))
