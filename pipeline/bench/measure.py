"""Timed runs of an engine: what one took, and which of several is the median.

Time is the engine's alone: requests are there before, nothing is written. Knows engines; refuses to
know workloads and files.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.engine import Engine
from pipeline.engine.transformers_backend import TransformersEngine
from pipeline.request import Request


@dataclass(frozen=True)
class Run:
    """One run of all rows.

    busy_share: share of the time in which a step was on the device, None where nobody measures it.
    """

    seconds: float
    new_tokens: int
    steps: int
    busy_share: float | None
    host_ms_per_step: dict[str, float] | None

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds

    @property
    def ms_per_step(self) -> float:
        return 1e3 * self.seconds / self.steps


@dataclass(frozen=True)
class _Meter:
    """An engine's counters at one moment."""

    steps: int
    busy_seconds: float | None
    phase_seconds: Mapping[str, float] | None


def timed_run(engine: Engine | TransformersEngine, requests: Sequence[Request]) -> Run:
    """Generate all rows. RuntimeError for a row that ends early or not at all: the figures would be wrong."""
    before = _read_meter(engine)
    started = time.perf_counter()
    completions = list(engine.generate(requests))
    seconds = time.perf_counter() - started
    after = _read_meter(engine)
    for completion in completions:
        expected, made = completion.request.params.max_tokens, len(completion.token_ids)
        if completion.error is not None or made != expected:
            row = completion.request.key.row
            raise RuntimeError(f"row {row} made {made} of {expected} tokens: {completion.error}")
    if len(completions) != len(requests):
        raise RuntimeError(f"{len(completions)} of {len(requests)} rows came back")
    return _run(before, after, seconds, sum(len(c.token_ids) for c in completions))


def _run(before: _Meter, after: _Meter, seconds: float, new_tokens: int) -> Run:
    steps = after.steps - before.steps
    busy = phases = None
    if before.busy_seconds is not None and after.busy_seconds is not None:
        busy = (after.busy_seconds - before.busy_seconds) / seconds
    if before.phase_seconds is not None and after.phase_seconds is not None:
        phases = {
            name: 1e3 * (total - before.phase_seconds[name]) / steps
            for name, total in after.phase_seconds.items()
        }
    return Run(seconds, new_tokens, steps, busy, phases)


def _read_meter(engine: Engine | TransformersEngine) -> _Meter:
    if isinstance(engine, TransformersEngine):
        return _Meter(engine.stats.num_steps, None, None)
    stats = engine.stats
    return _Meter(stats.counters.num_steps, stats.busy_seconds, stats.phase_seconds)


def median_run(runs: Sequence[Run]) -> Run:
    """The run in the middle by time; of two in the middle, the faster."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
