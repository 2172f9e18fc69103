"""The host's mirror of the device: what is sent, applied to a copy, is what every step needs."""

from __future__ import annotations

import numpy as np
import pytest
from fakes import FixedDraws

from pipeline.engine.batch import GroupInputs, StepInputs
from pipeline.engine.sampling_inputs import Draws, SamplingInputs
from pipeline.engine.slot_state import (
    GIVEN_ID,
    HEADER_WORDS,
    KEY_0,
    KEY_1,
    NO_ID,
    NUM_PROMPT,
    POSITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SlotMirror,
    StateChanges,
    words_per_slot,
)

SLOTS, BLOCKS, GROUPS = 6, 8, 2


def step(
    slots: list[int],
    starts: list[int],
    num_blocks: list[int],
    epochs: list[int] | None = None,
    carry: bool = True,
) -> StepInputs:
    """A decode step; block b of slot s is 10 s + b in the first group, 100 more in the second."""
    count, held = len(slots), max(num_blocks)
    rows = np.array(slots, np.int32)
    table = (10 * rows[:, None] + np.arange(held)[None, :]).astype(np.int32)
    table[np.arange(held)[None, :] >= np.array(num_blocks)[:, None]] = 0
    return StepInputs(
        slots=rows,
        epochs=np.array(epochs or [0] * count, np.int64),
        num_blocks=np.array(num_blocks, np.int32),
        input_ids=np.arange(count) + 50,
        positions=np.array(starts, np.int64),
        carry_tokens=np.arange(count if carry else 0),
        carry_slots=rows[: count if carry else 0].astype(np.int64),
        starts=np.array(starts, np.int32),
        query_lens=np.ones(count, np.int32),
        groups={None: GroupInputs(rows, table), 8: GroupInputs(rows, np.where(table > 0, table + 100, 0))},
        logits_index=np.arange(count),
        sampling=SamplingInputs(
            slots=rows.astype(np.int64),
            temperature=np.linspace(0.5, 0.9, count).astype(np.float32),
            top_k=np.arange(count, dtype=np.int32),
            top_p=np.full(count, 0.8, np.float32),
            min_p=np.zeros(count, np.float32),
            draws=Draws(np.full((count, 2), 2**32 - 5, np.uint32), np.array(starts) - 2),
            forbidden=np.empty((0, 2), np.int64),
        ),
    )


class Device:
    """Words as a device would keep them."""

    def __init__(self) -> None:
        self.words = np.zeros((SLOTS + 1, words_per_slot(GROUPS, BLOCKS)), np.int32)
        self.rows = np.zeros(0, np.int32)

    def apply(self, changes: StateChanges) -> None:
        if changes.rows is not None:
            self.rows = changes.rows
        self.words[changes.slots] = changes.words
        self.words.reshape(-1)[changes.places] = changes.blocks
        live = self.rows[self.rows < SLOTS]
        self.words[live, POSITION] += 1

    def table(self, slot: int, group: int) -> list[int]:
        begin = HEADER_WORDS + group * BLOCKS
        return self.words[slot, begin : begin + BLOCKS].tolist()


@pytest.fixture
def mirror() -> SlotMirror:
    return SlotMirror(SLOTS, GROUPS, BLOCKS)


def test_a_new_row_is_sent_whole(mirror: SlotMirror) -> None:
    changes = mirror.changes(step([1, 4], [7, 20], [1, 2], carry=False), padded=4)
    assert changes.rows is not None and changes.rows.tolist() == [1, 4, SLOTS, SLOTS]
    assert changes.slots.tolist() == [1, 4] and not len(changes.places)
    words = changes.words
    assert words[:, POSITION].tolist() == [7, 20]
    # Draw number start - 2 is made where start + 1 tokens are there: a prompt of three.
    assert words[:, NUM_PROMPT].tolist() == [3, 3]
    assert words[:, TOP_K].tolist() == [0, 1]
    assert words[:, TEMPERATURE].view(np.float32).tolist() == pytest.approx([0.5, 0.9])
    assert words[0, TOP_P : TOP_P + 1].view(np.float32)[0] == pytest.approx(0.8)
    assert words[0, KEY_0 : KEY_1 + 1].view(np.uint32).tolist() == [2**32 - 5] * 2
    assert words[:, GIVEN_ID].tolist() == [50, 51]
    assert changes.num_words == 4 + 2 + words.size


def test_an_id_that_only_the_device_has_is_not_sent(mirror: SlotMirror) -> None:
    changes = mirror.changes(step([1], [7], [1]), padded=1)
    assert changes.words[:, GIVEN_ID].tolist() == [NO_ID]


def test_the_same_rows_one_position_on_send_nothing(mirror: SlotMirror) -> None:
    mirror.changes(step([1, 4], [7, 20], [1, 2]), padded=2)
    changes = mirror.changes(step([1, 4], [8, 21], [1, 2]), padded=2)
    assert not changes.any and changes.num_words == 0


def test_added_blocks_alone_are_sent_for_every_group(mirror: SlotMirror) -> None:
    device = Device()
    device.apply(mirror.changes(step([1, 4], [7, 20], [1, 2]), padded=2))
    changes = mirror.changes(step([1, 4], [8, 21], [3, 2]), padded=2)
    assert changes.rows is None and not len(changes.slots) and changes.num_words == 8
    device.apply(changes)
    assert device.table(1, 0)[:4] == [10, 11, 12, 0] and device.table(1, 1)[:4] == [110, 111, 112, 0]
    assert device.table(4, 0)[:3] == [40, 41, 0]


@pytest.mark.parametrize(
    "second",
    [
        step([1, 4], [8, 21], [1, 2], epochs=[0, 1]),
        step([1, 4], [8, 35], [1, 2]),
    ],
    ids=["another sequence", "another position"],
)
def test_a_slot_that_is_not_as_the_device_has_it_is_sent_whole(
    mirror: SlotMirror, second: StepInputs
) -> None:
    mirror.changes(step([1, 4], [7, 20], [1, 2]), padded=2)
    assert mirror.changes(second, padded=2).slots.tolist() == [4]


def test_another_order_or_padding_sends_the_rows(mirror: SlotMirror) -> None:
    mirror.changes(step([1, 4], [7, 20], [1, 2]), padded=2)
    order = mirror.changes(step([4, 1], [21, 8], [2, 1]), padded=2)
    assert order.rows is not None and order.rows.tolist() == [4, 1] and not len(order.slots)
    padding = mirror.changes(step([4, 1], [22, 9], [2, 1]), padded=4)
    assert padding.rows is not None and padding.rows.tolist() == [4, 1, SLOTS, SLOTS]


def test_a_step_that_the_host_sent_moves_positions(mirror: SlotMirror) -> None:
    mirror.changes(step([1, 4], [7, 20], [1, 2]), padded=2)
    assert mirror.advance(step([1, 4], [8, 21], [1, 2])).tolist() == [9, 22]
    assert not mirror.changes(step([1, 4], [9, 22], [1, 2]), padded=2).any


def test_what_is_lost_is_sent_again(mirror: SlotMirror) -> None:
    mirror.changes(step([1, 4], [7, 20], [1, 2]), padded=2)
    mirror.forget()
    changes = mirror.changes(step([1, 4], [8, 21], [1, 2]), padded=2)
    assert changes.rows is not None and changes.slots.tolist() == [1, 4]


def test_random_steps_leave_the_device_as_the_host_sees_it() -> None:
    rng = np.random.default_rng(0)
    mirror, device = SlotMirror(SLOTS, GROUPS, BLOCKS), Device()
    epochs, positions = np.zeros(SLOTS, np.int64), rng.integers(0, 9, SLOTS)
    for _ in range(300):
        slots = 1 + rng.permutation(SLOTS - 1)[: rng.integers(1, SLOTS)]
        for slot in slots:
            if rng.random() < 0.1 or positions[slot] >= 4 * BLOCKS - 1:
                epochs[slot] += 1
                positions[slot] = rng.integers(0, 9)
        blocks = positions[slots] // 4 + 1
        inputs = step(
            slots.tolist(), positions[slots].tolist(), blocks.tolist(), epochs=epochs[slots].tolist()
        )
        if rng.random() < 0.2:
            device.words[slots, POSITION] = mirror.advance(inputs)
        else:
            device.apply(mirror.changes(inputs, padded=SLOTS))
            assert device.rows[: len(slots)].tolist() == slots.tolist()
            for slot, held in zip(slots.tolist(), blocks.tolist(), strict=True):
                assert device.table(slot, 0)[:held] == [10 * slot + b for b in range(held)]
                assert device.table(slot, 1)[:held] == [100 + 10 * slot + b for b in range(held)]
        positions[slots] += 1
        assert device.words[slots, POSITION].tolist() == positions[slots].tolist()


def test_draws_are_made_when_they_are_asked_for() -> None:
    drawn = step([1], [7], [1]).sampling
    assert "uniform" not in vars(drawn.draws)
    assert 0 <= drawn.uniform[0] < 1
    assert FixedDraws(np.array([0.25])).uniform.tolist() == [0.25]
