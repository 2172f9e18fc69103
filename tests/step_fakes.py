"""A model in a few lines of integers that notices every mistake in scheduling, and its driver.

The stub keeps its own KV memory. Each position holds its token and a hash of all tokens up to it,
made from what the memory holds for the position before, so a wrong, missing or overwritten block
changes the hash, and with it the next token. Knows inputs and ids; needs no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from fakes import request

from pipeline.engine.batch import StepInputs, build_inputs
from pipeline.engine.block_manager import NULL_BLOCK, BlockManager
from pipeline.engine.block_tables import BlockGroup, BlockTables
from pipeline.engine.scheduler import Schedule, Scheduler
from pipeline.engine.sequence import Sequence, SequenceTable, make_sequence

STUB_VOCABULARY = 7
STUB_STOP = 0
_START = 17
# Far more than any row of these tests needs: a driver that gets here does not get on.
_MOST_STEPS = 20_000
# Blocks that a sequence's table has room for.
_LONGEST_TABLE = 600


def chained(before: int, token: int) -> int:
    return (before * 1_000_003 + token + 1) % 2_147_483_647


def next_token(digest: int, uniform: float) -> int:
    return (digest + int(uniform * 1_000)) % STUB_VOCABULARY


class StubModel:
    """Stands where the model runner stands: step inputs in, sampled ids int32 [N] out."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        # By layer group and KV position.
        self._memory: dict[tuple[int | None, int], tuple[int, int]] = {}
        self._last_ids = np.zeros(num_slots, np.int64)

    def run(self, inputs: StepInputs) -> np.ndarray:
        ids = inputs.input_ids.copy()
        ids[inputs.carry_tokens] = self._last_ids[inputs.carry_slots]
        digests = self._write(inputs, ids)
        for row in range(len(inputs.starts)):
            for window in inputs.groups:
                self._check(inputs, row, window)
        sampled = [
            next_token(digests[int(end)], float(uniform))
            for end, uniform in zip(inputs.logits_index, inputs.sampling.uniform, strict=True)
        ]
        self._last_ids[inputs.sampling.slots] = sampled
        return np.array(sampled, np.int32)

    def _place(
        self, inputs: StepInputs, window: int | None, row: int, position: int
    ) -> tuple[int | None, int]:
        block = int(inputs.groups[window].block_tables[row, position // self._block_size])
        assert block != NULL_BLOCK, f"position {position} of row {row} has no block"
        return window, block * self._block_size + position % self._block_size

    def _write(self, inputs: StepInputs, ids: np.ndarray) -> list[int]:
        """All rows' tokens, in the order of the batch: a twin may read what the row before it wrote.

        Returns each token's hash, made from what the first group holds for the position before.
        """
        for group in inputs.groups.values():
            assert len(set(group.slot_mapping.tolist())) == len(ids), "two tokens write one position"
        first = next(iter(inputs.groups))
        digests: list[int] = []
        for row, (start, count) in enumerate(zip(inputs.starts, inputs.query_lens, strict=True)):
            before = self._memory[self._place(inputs, first, row, start - 1)][1] if start else _START
            for position in range(start, start + count):
                flat = len(digests)
                token = int(ids[flat])
                before = chained(before, token)
                assert inputs.positions[flat] == position
                for window, group in inputs.groups.items():
                    place = self._place(inputs, window, row, position)
                    assert group.slot_mapping[flat] == place[1]
                    self._memory[place] = (token, before)
                digests.append(before)
        return digests

    def _check(self, inputs: StepInputs, row: int, window: int | None) -> None:
        """Every position that the row's queries can see holds what belongs there."""
        start, end = int(inputs.starts[row]), int(inputs.starts[row] + inputs.query_lens[row])
        begin = 0 if window is None else max(0, start - window + 1)
        digest = _START
        for position in range(begin, end):
            token, kept = self._memory[self._place(inputs, window, row, position)]
            # What lies before a window is out of sight; from its first position on, all must fit.
            digest = kept if position == begin > 0 else chained(digest, token)
            assert kept == digest, f"position {position} of row {row} holds another row's memory"


def expected_tokens(sequence: Sequence, uniform: Callable[[int], float]) -> list[int]:
    """What the stub makes of a sequence by itself; uniform: number of the completion token -> draw."""
    tokens = sequence.request.prompt_ids.tolist()
    digest = _START
    for token in tokens:
        digest = chained(digest, token)
    completion: list[int] = []
    while len(tokens) + len(completion) < sequence.limit:
        completion.append(next_token(digest, uniform(len(completion))))
        digest = chained(digest, completion[-1])
        if completion[-1] in sequence.stop_ids:
            break
    return completion


def stub_sequence(
    row: int,
    prompt: list[int],
    max_tokens: int,
    *,
    sample: int = 0,
    max_model_len: int = 10_000,
    **params: Any,
) -> Sequence:
    return make_sequence(
        request(row, prompt, max_tokens=max_tokens, temperature=1.0, **params),
        sample,
        seed=0,
        max_model_len=max_model_len,
        eos_ids=(STUB_STOP,),
        matcher=None,
        block_hashes=[],
    )


def make_scheduler(
    *,
    num_slots: int = 4,
    num_blocks: int | dict[int | None, int] = 64,
    block_size: int = 4,
    budget: int = 32,
    sharing: bool = True,
    reserve: float = 1.0,
    windows: tuple[int | None, ...] = (None,),
) -> Scheduler:
    """windows: one layer group each. num_blocks: of every group, or by window."""
    counts = num_blocks if isinstance(num_blocks, dict) else dict.fromkeys(windows, num_blocks)
    groups = [
        BlockGroup(window, BlockManager(counts[window], block_size), num_slots, _LONGEST_TABLE, budget)
        for window in windows
    ]
    return Scheduler(
        SequenceTable(num_slots),
        BlockTables(groups),
        max_num_batched_tokens=budget,
        prefix_sharing=sharing,
        reserve=reserve,
    )


def drive(
    scheduler: Scheduler,
    sequences: Iterable[Sequence],
    *,
    overlap: bool,
    observe: Callable[[Schedule | None], None] = lambda schedule: None,
) -> list[Sequence]:
    """The engine's loop around the stub; with overlap a result comes one step late."""
    model = StubModel(scheduler.table.num_slots, scheduler.blocks.block_size)
    queue, finished = deque(sequences), []
    in_flight: tuple[Schedule, np.ndarray] | None = None
    for _ in range(_MOST_STEPS):
        while queue and scheduler.num_waiting < scheduler.table.num_slots:
            scheduler.add(queue.popleft())
        schedule = scheduler.schedule()
        observe(schedule)
        launched = None
        if schedule is not None:
            inputs = build_inputs(schedule, scheduler.table, scheduler.blocks)
            launched = (schedule, model.run(inputs))
        if not overlap:
            in_flight, launched = launched, None
        assert in_flight or launched or not scheduler.has_work, "nothing runs although there is work"
        if in_flight is not None:
            finished += scheduler.update(*in_flight)
        in_flight = launched
        if in_flight is None and not queue and not scheduler.has_work:
            return finished
    raise AssertionError(f"not done after {_MOST_STEPS} steps")
