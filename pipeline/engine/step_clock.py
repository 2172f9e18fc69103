"""Where the host's time goes: one clock, always in one phase of the engine's loop.

Entering a phase ends the one before, so that the phases add up to the whole. Costs one reading of the
clock a phase. Knows phases and the window that is recorded; refuses to know what happens in a phase.
"""

from __future__ import annotations

import time
from typing import Literal, get_args

from pipeline.engine.slots import Slots
from pipeline.timeline import HostSpan, Timeline

# intake: requests are pulled. schedule: the next step is planned. prepare: its inputs are laid out.
# launch: it is handed to the device. wait: the host is blocked by a step, be it for its result or, where
# the host itself computes, while it does. update: ids enter the sequences. complete: finished rows become
# completions. consumer: whoever iterates is at work, or is asked whether to stop.
Phase = Literal["intake", "schedule", "prepare", "launch", "wait", "update", "complete", "consumer"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class StepClock:
    """Sums the time of each phase while it runs; as a context manager it starts and stops."""

    def __init__(self) -> None:
        self._spent: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        self._phase: Phase = "consumer"
        self._step = 0
        self._since: int | None = None
        self._record: list[tuple[Phase, int, int, int]] | None = None

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase so far, the present phase's included."""
        spent: dict[str, float] = {phase: ns / 1e9 for phase, ns in self._spent.items()}
        if self._since is not None:
            spent[self._phase] += (time.perf_counter_ns() - self._since) / 1e9
        return spent

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """End the present phase, begin another. step: the one it is about; None: the same as before."""
        now = time.perf_counter_ns()
        assert self._since is not None, "the clock stands still"
        self._spent[self._phase] += now - self._since
        if self._record is not None:
            self._record.append((self._phase, self._step, self._since, now))
        self._phase, self._since = phase, now
        if step is not None:
            self._step = step

    def start_recording(self) -> None:
        self._record = []

    def stop_recording(self) -> list[HostSpan]:
        """What was recorded, in order; the present phase as far as it has come."""
        self.enter(self._phase)
        assert self._record is not None
        recorded, self._record = self._record, None
        return [HostSpan(phase, step, begin / 1e9, end / 1e9) for phase, step, begin, end in recorded]

    def __enter__(self) -> StepClock:
        self._phase, self._step, self._since = "consumer", 0, time.perf_counter_ns()
        return self

    def __exit__(self, *_: object) -> None:
        self.enter("consumer")
        self._since = self._record = None


class WindowRecorder:
    """Records one window of steps, from when `first` is prepared until the last one's result is there.

    timeline: the window once it is over, None before and if it was never reached.
    """

    def __init__(self, clock: StepClock, slots: Slots, mode: str, on_gpu: bool, window: range) -> None:
        self.timeline: Timeline | None = None
        self._clock, self._slots = clock, slots
        self._mode, self._on_gpu = mode, on_gpu
        self._window = window
        self._recording = False

    def turn(self, num_launched: int, num_done: int) -> None:
        """To be called between steps, with how many were launched and how many results were taken."""
        if self.timeline is not None or num_launched < self._window.start:
            return
        if not self._recording:
            if self._window:
                self._recording = True
                self._slots.record_spans(True)
                self._clock.start_recording()
        elif num_done >= self._window.stop:
            self.close()

    def close(self) -> None:
        """End the window, if one is open."""
        if not self._recording:
            return
        self._recording = False
        self._slots.record_spans(False)
        host, device = self._clock.stop_recording(), self._slots.take_spans()
        self.timeline = Timeline(self._mode, self._on_gpu, host, device)
