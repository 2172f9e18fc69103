"""For any rows and any settings: nothing is lost, nobody's memory is touched, no promise is broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st
from step_fakes import STUB_STOP, drive, expected_tokens, make_scheduler, stub_sequence

from pipeline.engine.block_manager import NULL_BLOCK
from pipeline.engine.philox import uniforms
from pipeline.engine.scheduler import Schedule, Scheduler
from pipeline.engine.sequence import Sequence
from pipeline.request import FinishReason


@dataclass(frozen=True)
class Settings:
    num_slots: int
    budget: int
    block_size: int
    spare_blocks: int
    reserve: float
    sharing: bool
    overlap: bool
    windows: tuple[int | None, ...]


SETTINGS = st.builds(
    Settings,
    num_slots=st.integers(1, 5),
    budget=st.integers(1, 24),
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 12),
    reserve=st.sampled_from([0.0, 0.4, 1.0]),
    sharing=st.booleans(),
    overlap=st.booleans(),
    # Full attention alone, sliding alone, and both; a window of one sees itself only.
    windows=st.sampled_from([(None,), (None,), (6,), (None, 3), (None, 2, 7)]),
)
# Two ids and one usual beginning, so that prefixes meet.
PROMPT = st.builds(
    lambda begin, rest: [1, 2, 1, 1, 2, 2, 1, 2, 1, 1, 1, 2][:begin] + rest,
    st.integers(0, 12),
    st.lists(st.integers(1, 2), min_size=1, max_size=10),
)
ROWS = st.lists(st.tuples(PROMPT, st.integers(1, 14), st.integers(1, 3)), min_size=1, max_size=10)


def make_sequences(rows: list[tuple[list[int], int, int]]) -> list[Sequence]:
    """The samples of a row share their list of hashes, as the engine's do."""
    sequences = []
    for row, (prompt, max_tokens, num_samples) in enumerate(rows):
        hashes: list[bytes] = []
        for sample in range(num_samples):
            sequences.append(stub_sequence(row, prompt, max_tokens, sample=sample))
            sequences[-1].block_hashes = hashes
    return sequences


def fewest_blocks(chosen: Settings, sequences: list[Sequence]) -> dict[int | None, int]:
    """Barely enough for the longest row alone, and the spare ones: a sliding group keeps a window only."""
    longest = max(-(-s.limit // chosen.block_size) for s in sequences)
    counts: dict[int | None, int] = {}
    for window in chosen.windows:
        seen = longest
        if window is not None:
            seen = min(longest, -(-(window - 1 + chosen.budget) // chosen.block_size) + 1)
        counts[window] = 1 + seen + chosen.spare_blocks
    return counts


def everything_is_free(scheduler: Scheduler) -> bool:
    return all(g.manager.num_free == g.manager.capacity for g in scheduler.blocks.groups)


class Watch:
    """Looks at the table after each plan."""

    def __init__(self, scheduler: Scheduler, chosen: Settings) -> None:
        self.scheduler, self.chosen = scheduler, chosen
        self.first_admitted: dict[int, int] = {}

    def __call__(self, schedule: Schedule | None) -> None:
        self.blocks_belong_to_those_who_hold_them()
        table = self.scheduler.table
        for slot, sequence in enumerate(table.sequences):
            if sequence is not None:
                self.first_admitted.setdefault(id(sequence), int(table.admitted[slot]))
        if schedule is not None:
            self.plan_keeps_its_bounds(schedule)

    def blocks_belong_to_those_who_hold_them(self) -> None:
        table, blocks = self.scheduler.table, self.scheduler.blocks
        for group in blocks.groups:
            held = [
                group.table[s, group.first[s] : blocks.num_blocks[s]].tolist() for s in range(table.num_slots)
            ]
            owners = Counter(block for one in held for block in one)
            assert NULL_BLOCK not in owners
            assert all(len(one) == len(set(one)) for one in held)
            assert group.manager.num_free == group.manager.capacity - len(owners)
            assert {b: int(n) for b, n in enumerate(group.manager._references) if n} == dict(owners)
            if not self.chosen.sharing:
                assert set(owners.values()) <= {1}

    def plan_keeps_its_bounds(self, schedule: Schedule) -> None:
        table = self.scheduler.table
        slots = schedule.slots
        assert 0 < schedule.num_tokens <= self.chosen.budget
        assert len(set(slots.tolist())) == len(slots) <= self.chosen.num_slots
        assert (schedule.query_lens > 0).all() and table.running[slots].all()
        ends = schedule.starts + schedule.query_lens
        assert (ends <= self.scheduler.blocks.num_blocks[slots] * self.chosen.block_size).all()
        # The last position of a row is never computed: no token comes after it.
        assert (ends < table.limit[slots]).all()


@settings(max_examples=250, deadline=None)
@given(chosen=SETTINGS, rows=ROWS)
def test_any_rows_under_any_settings(chosen: Settings, rows: list[tuple[list[int], int, int]]) -> None:
    sequences = make_sequences(rows)
    keys = [s.philox_key.copy() for s in sequences]
    expected = [
        expected_tokens(s, lambda n, k=key: uniforms(k[None], np.array([n]))[0])  # type: ignore[misc]
        for s, key in zip(sequences, keys, strict=True)
    ]
    scheduler = make_scheduler(
        num_slots=chosen.num_slots,
        num_blocks=fewest_blocks(chosen, sequences),
        block_size=chosen.block_size,
        budget=chosen.budget,
        sharing=chosen.sharing,
        reserve=chosen.reserve,
        windows=chosen.windows,
    )
    watch = Watch(scheduler, chosen)

    finished = drive(scheduler, sequences, overlap=chosen.overlap, observe=watch)

    assert Counter(map(id, finished)) == Counter(map(id, sequences)), "each ends exactly once"
    for sequence, tokens in zip(sequences, expected, strict=True):
        assert sequence.tokens[sequence.num_prompt_tokens :].tolist() == tokens
        stopped = tokens[-1] == STUB_STOP
        assert sequence.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    order = [watch.first_admitted[id(s)] for s in sequences]
    assert order == sorted(order), "first come, first admitted"
    assert everything_is_free(scheduler)
    assert scheduler.num_running == scheduler.num_waiting == 0
    fired = scheduler.counters
    if chosen.reserve == 1:
        assert fired.num_preemptions == 0
    if not chosen.sharing:
        assert fired.num_shared_blocks == 0
    if not chosen.overlap:
        assert fired.num_wasted_row_steps == 0
    for name in (
        "num_preemptions",
        "num_shared_blocks",
        "num_partial_prefill_chunks",
        "num_wasted_row_steps",
    ):
        event(f"{name} > 0: {getattr(fired, name) > 0}")


@settings(max_examples=60, deadline=None)
@given(chosen=SETTINGS, rows=ROWS, steps=st.integers(0, 12))
def test_dropping_everything_at_any_moment_leaves_nothing_behind(
    chosen: Settings, rows: list[tuple[list[int], int, int]], steps: int
) -> None:
    """A caller leaves in the middle; the next one finds an empty scheduler that works."""
    scheduler = make_scheduler(
        num_slots=chosen.num_slots,
        num_blocks=fewest_blocks(chosen, make_sequences(rows)),
        block_size=chosen.block_size,
        budget=chosen.budget,
        reserve=chosen.reserve,
        windows=chosen.windows,
        sharing=False,
    )

    class LeavesEarly(Exception):
        pass

    def leave(schedule: Schedule | None) -> None:
        if scheduler.counters.num_steps > steps:
            raise LeavesEarly

    try:
        drive(scheduler, make_sequences(rows), overlap=chosen.overlap, observe=leave)
    except LeavesEarly:
        pass
    scheduler.drop_all()
    assert scheduler.num_running == scheduler.num_waiting == 0 and not scheduler.has_work
    assert everything_is_free(scheduler)
    again = drive(scheduler, make_sequences(rows), overlap=chosen.overlap)
    assert len(again) == len(make_sequences(rows))
