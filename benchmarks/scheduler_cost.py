"""Host time of a step while ever more sequences wait: it must not grow with them.

    python benchmarks/scheduler_cost.py

Plans decode steps of 64 running sequences (no model: every step's tokens are made up) with 100 to
100,000 sequences waiting, and prints the median and the 90th percentile of schedule + inputs +
update.
"""

from __future__ import annotations

import time

import numpy as np

from pipeline.engine.batch import build_inputs
from pipeline.engine.block_manager import BlockManager
from pipeline.engine.block_tables import BlockGroup, BlockTables
from pipeline.engine.scheduler import Scheduler
from pipeline.engine.sequence import SequenceTable, make_sequence
from pipeline.request import Request, RowKey, SamplingParams

_NUM_SLOTS = 64
_STEPS = 300
_PARAMS = SamplingParams(temperature=0.0, max_tokens=200)


def step_seconds(num_waiting: int) -> np.ndarray:
    """Host seconds of each of _STEPS steps."""
    blocks = BlockTables([BlockGroup(None, BlockManager(4096, 16), _NUM_SLOTS, 64, 512)])
    scheduler = Scheduler(SequenceTable(_NUM_SLOTS), blocks, max_num_batched_tokens=512)
    rng = np.random.default_rng(0)
    for row in range(_NUM_SLOTS + num_waiting):
        request = Request(RowKey(0, row), rng.integers(2, 1000, 32).astype(np.int32), _PARAMS)
        scheduler.add(
            make_sequence(
                request,
                0,
                seed=0,
                max_model_len=1024,
                eos_ids=(1,),
                matcher=None,
                block_hashes=[],
            )
        )
    seconds = []
    while len(seconds) < _STEPS:
        started = time.perf_counter()
        schedule = scheduler.schedule()
        assert schedule is not None
        build_inputs(schedule, scheduler.table, blocks)
        scheduler.update(schedule, np.full(int(schedule.sampled.sum()), 7, np.int32))
        seconds.append(time.perf_counter() - started)
    return np.array(seconds)


def main() -> None:
    print(f"{'waiting':>9}  {'median':>9}  {'90 %':>9}   (host time of a step of {_NUM_SLOTS} sequences)")
    for num_waiting in (100, 1_000, 10_000, 100_000):
        micros = step_seconds(num_waiting) * 1e6
        print(f"{num_waiting:>9,}  {np.median(micros):>6.0f} us  {np.percentile(micros, 90):>6.0f} us")


if __name__ == "__main__":
    main()
