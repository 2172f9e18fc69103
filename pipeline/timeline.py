"""A recorded window of an engine's steps, as plain values: what host and device did, and when.

Knows arithmetic on spans of time; refuses to know who records them and who draws them. All times are
seconds on the clock of `time.perf_counter()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The device's rows, in the order in which a step passes through them.
DEVICE_ROWS = ("H2D", "compute", "D2H")


@dataclass(frozen=True)
class HostSpan:
    """The host in one phase of its loop. step: the one it prepares, waits for or takes in."""

    phase: str
    step: int
    begin: float
    end: float


@dataclass(frozen=True)
class DeviceSpan:
    """A step on the device. row: "H2D", "compute" or "D2H". slot: which of the two batches, 0 or 1."""

    row: str
    step: int
    slot: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What was recorded. mode: "sync" or "async". Steps count from 0 where generating began."""

    mode: str
    on_gpu: bool
    host: Sequence[HostSpan]
    device: Sequence[DeviceSpan]

    @property
    def compute(self) -> list[DeviceSpan]:
        """The steps on the device, in order. One device computes one step at a time."""
        return sorted((span for span in self.device if span.row == "compute"), key=lambda span: span.begin)

    @property
    def busy_share(self) -> float | None:
        """Share of the time from the first to the last compute's begin in which a step computed."""
        steps = self.compute
        seconds = steps[-1].begin - steps[0].begin if steps else 0.0
        return sum(span.end - span.begin for span in steps[:-1]) / seconds if seconds > 0 else None

    @property
    def step_seconds(self) -> float | None:
        """Mean time from one step's begin on the device to the next one's; None for fewer than two."""
        steps = self.compute
        return (steps[-1].begin - steps[0].begin) / (len(steps) - 1) if len(steps) > 1 else None
