"""Two batches in turn: while one computes, the next is prepared.

All concurrency of the engine lives here. On the CPU a worker thread stands where a GPU has its
streams: steps run one after the other in the order they were launched, and an event tells when a
result is there. Knows threads and hand-over; refuses to know what a step computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from pipeline.engine.batch import StepInputs
from pipeline.engine.model_runner import StepOutput
from pipeline.timeline import DeviceSpan

Inputs = TypeVar("Inputs")
Output = TypeVar("Output")


class InFlight(Protocol):
    """A step that was launched."""

    def result(self) -> StepOutput:
        """Block until the step is over; raise here what it raised there."""
        ...


class Slots(Protocol):
    """What the engine launches its steps with. busy_seconds: time spent in steps since entered."""

    @property
    def busy_seconds(self) -> float: ...
    def launch(self, inputs: StepInputs) -> InFlight: ...
    def record_spans(self, on: bool) -> None:
        """Whether steps launched from now on are recorded. Steps count from 0 since entered."""
        ...

    def take_spans(self) -> list[DeviceSpan]:
        """Recorded spans of the steps whose results were taken, each handed out once."""
        ...

    def __enter__(self) -> Slots: ...
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


class BatchSlot(Generic[Inputs, Output]):
    """One step between launch and result. `done` is set when `output` or `error` is there.

    number: which of the two this is. step, recorded: the step in it, and whether its time is asked for.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.step = 0
        self.recorded = False
        self.done = threading.Event()
        self.done.set()
        self.inputs: Inputs | None = None
        self.output: Output | None = None
        self.error: BaseException | None = None

    def fill(self, inputs: Inputs, step: int, recorded: bool) -> None:
        # Its buffers may be overwritten only after the step that reads them is over.
        assert self.done.is_set(), "the slot's step is still running"
        self.inputs, self.output, self.error = inputs, None, None
        self.step, self.recorded = step, recorded
        self.done.clear()

    def compute(self, step: Callable[[Inputs], Output]) -> None:
        assert self.inputs is not None
        try:
            self.output = step(self.inputs)
        except BaseException as error:  # handed to whoever waits for the result
            self.error = error

    def result(self) -> Output:
        """Block until the step is over; raise here what it raised there."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output


class BatchSlots(Generic[Inputs, Output]):
    """Launches steps in order and keeps two in the air (`async`), or one (`sync`).

    busy_seconds: time spent in steps so far. Use as a context manager: leaving ends the thread.
    """

    def __init__(self, step: Callable[[Inputs], Output], *, overlap: bool) -> None:
        self._step = step
        self._slots: tuple[BatchSlot[Inputs, Output], ...] = (BatchSlot(0), BatchSlot(1))
        self._num_launched = 0
        self._records = False
        self._spans: list[DeviceSpan] = []
        self._queue: queue.SimpleQueue[BatchSlot[Inputs, Output] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy_seconds = 0.0
        if overlap:
            self._thread = threading.Thread(target=self._work, name="tokenmill-steps", daemon=True)
            self._thread.start()

    def launch(self, inputs: Inputs) -> BatchSlot[Inputs, Output]:
        """Start a step after those launched before; with overlap, return at once."""
        slot = self._slots[self._num_launched % 2]
        slot.fill(inputs, self._num_launched, self._records)
        self._num_launched += 1
        if self._thread is None:
            self._timed(slot)
        else:
            self._queue.put(slot)
        return slot

    def _timed(self, slot: BatchSlot[Inputs, Output]) -> None:
        started = time.perf_counter()
        slot.compute(self._step)
        ended = time.perf_counter()
        self.busy_seconds += ended - started
        if slot.recorded:
            self._spans.append(DeviceSpan("compute", slot.step, slot.number, started, ended))
        # Last: whoever has the result may ask for its time.
        slot.done.set()

    def record_spans(self, on: bool) -> None:
        """Whether steps launched from now on are recorded, as `compute`."""
        self._records = on

    def take_spans(self) -> list[DeviceSpan]:
        """Recorded spans of the steps that are over, each handed out once."""
        spans, self._spans = self._spans, []
        return spans

    def _work(self) -> None:
        while (slot := self._queue.get()) is not None:
            self._timed(slot)

    def close(self) -> None:
        """Let the steps in the air end, then the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def __enter__(self) -> BatchSlots[Inputs, Output]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Who interrupts a second time does not want to wait for a step.
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            self.close()
