"""Two batches in turn on a GPU: three streams, two slots, events between them.

Inputs go up on one stream, compute runs on another, results come down on a third; none of them is
the default stream. Events order them on the device; the host waits for nothing but the event behind
a result's copy, and sleeps while it waits. While batch N computes, the host prepares batch N+1 and
enqueues it: the device goes from one to the other without asking.

Knows streams, events and pinned memory; refuses to know what a step computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from pipeline.engine.batch import StepInputs
from pipeline.engine.cuda_runner import CudaRunner, StepShape, pack
from pipeline.engine.model_runner import StepOutput
from pipeline.engine.slot_state import SlotMirror
from pipeline.engine.step_buffers import StepLayout, fill
from pipeline.engine.step_outputs import OutputLayout
from pipeline.models.forward import Forward
from pipeline.timeline import DeviceSpan

_NOTHING_SAMPLED = StepOutput(np.empty(0, np.int32), None, None, None)


class CudaBatchSlot:
    """Pinned host memory, device memory and the events of one of the two batches.

    h2d_done, compute_done, d2h_done: where the slot's step is. What the host reads lies in pinned
    memory that `result` hands out as arrays of their own.
    """

    def __init__(self, number: int, num_bytes: int, num_output_words: int, device: torch.device) -> None:
        self.number = number
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.array = self.host.numpy()
        self.host_output = torch.empty(num_output_words, dtype=torch.int32, pin_memory=True)
        self.device_output = torch.empty(num_output_words, dtype=torch.int32, device=device)
        self.h2d_began, self.h2d_done, self.compute_began, self.compute_done, self.d2h_began = (
            torch.cuda.Event(enable_timing=True) for _ in range(5)
        )
        # blocking: the host sleeps instead of spinning, and leaves the core to whoever prepares batches.
        self.d2h_done = torch.cuda.Event(enable_timing=True, blocking=True)
        self.step = 0
        self.recorded = False
        self.sent = False
        self.output: OutputLayout | None = None
        self.num_sampled = 0
        # On the device, in steps whose results were taken since the slots were entered.
        self.busy_seconds = 0.0

    def result(self) -> StepOutput:
        """Wait for the copy of the step's result, and for nothing else."""
        self.d2h_done.synchronize()
        self.busy_seconds += self.compute_began.elapsed_time(self.compute_done) / 1e3
        if self.output is None:
            return _NOTHING_SAMPLED
        return self.output.read(self.host_output.numpy(), self.num_sampled)

    def spans(self, base: torch.cuda.Event, base_time: float) -> list[DeviceSpan]:
        """What the step did when, on the host's clock: base happened at base_time. The step is over."""
        rows = [("compute", self.compute_began, self.compute_done), ("D2H", self.d2h_began, self.d2h_done)]
        if self.sent:
            rows.insert(0, ("H2D", self.h2d_began, self.h2d_done))
        return [
            DeviceSpan(
                row,
                self.step,
                self.number,
                base_time + base.elapsed_time(began) / 1e3,
                base_time + base.elapsed_time(done) / 1e3,
            )
            for row, began, done in rows
        ]


class CudaSlots:
    """Launches steps in order, each after the one before, the two slots in turn.

    A slot is used again only after its last result was taken, so its memory is free by then.
    num_sent: bytes that went up since entered.
    """

    def __init__(self, runner: CudaRunner, largest: StepLayout) -> None:
        device = runner.loaded.device
        self.runner = runner
        self._h2d, self._compute, self._d2h = (torch.cuda.Stream(device) for _ in range(3))
        num_bytes = max(largest.num_bytes, 4 * _most_words(runner))
        num_output = runner.output.numel()
        self._slots = tuple(CudaBatchSlot(number, num_bytes, num_output, device) for number in range(2))
        self._mirror = SlotMirror(runner.num_slots, len(runner.windows), runner.blocks_per_row)
        self._num_launched = 0
        self._records = False
        self._base: tuple[torch.cuda.Event, float] | None = None
        self._spans: list[DeviceSpan] = []
        self.num_sent = 0
        # What was allocated and filled so far was so on the default stream.
        torch.cuda.synchronize(device)
        runner.capture(self._compute)

    @property
    def busy_seconds(self) -> float:
        """Time the compute stream had a step in work, results taken so far."""
        return sum(slot.busy_seconds for slot in self._slots)

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> CudaBatchSlot:
        """Enqueue copy up, compute and copy down; return at once."""
        runner, slot = self.runner, self._slots[self._num_launched % 2]
        shape = runner.shape_of(inputs)
        self._take_spans_of(slot)
        slot.step, slot.recorded = self._num_launched, self._records
        slot.num_sampled = len(inputs.logits_index)
        slot.sent = False
        try:
            if shape.is_made:
                self._launch_made(slot, shape, inputs)
            else:
                self._launch_sent(slot, shape, inputs)
        except Exception:
            # How far it came is unknown: its buffers must be free, and the device told everything again.
            self.close()
            self._mirror.forget()
            raise
        self._copy_down(slot)
        self._num_launched += 1
        return slot

    def _launch_sent(self, slot: CudaBatchSlot, shape: StepShape, inputs: StepInputs) -> None:
        """A step whose inputs the host sends: all of them."""
        runner, layout = self.runner, shape.layout
        fill(layout.arrays(slot.array), inputs, runner.windows, runner.num_slots)
        self._mirror.advance(inputs)
        self._copy_up(slot, layout.num_bytes)
        with torch.cuda.stream(self._compute):
            self._compute.wait_event(slot.h2d_done)
            slot.compute_began.record()
            self._keep(slot, runner.run(shape, slot.device, inputs))

    def _launch_made(self, slot: CudaBatchSlot, shape: StepShape, inputs: StepInputs) -> None:
        """A step that the device makes from what it knows: the host sends what is new, often nothing."""
        runner = self.runner
        assert shape.graph is not None
        if shape.graph not in runner.graphs:
            # Graphs that end at the logits are made when the first row asks for penalties, say.
            torch.cuda.synchronize(slot.device.device)
            runner.capture_one(shape.graph, self._compute)
        changes = self._mirror.changes(inputs, shape.graph.size)
        if changes.any:
            self._copy_up(slot, 4 * pack(changes, slot.array.view(np.int32)))
        with torch.cuda.stream(self._compute):
            if changes.any:
                self._compute.wait_event(slot.h2d_done)
            slot.compute_began.record()
            if changes.any:
                runner.apply(changes, slot.device.view(torch.int32))
            self._keep(slot, runner.replay(shape, inputs))

    def _copy_up(self, slot: CudaBatchSlot, num_bytes: int) -> None:
        slot.sent = True
        self.num_sent += num_bytes
        with torch.cuda.stream(self._h2d):
            slot.h2d_began.record()
            slot.device[:num_bytes].copy_(slot.host[:num_bytes], non_blocking=True)
            slot.h2d_done.record()

    def _keep(self, slot: CudaBatchSlot, output: OutputLayout | None) -> None:
        """Move the result, on the compute stream, to where the next step does not overwrite it."""
        slot.output = output
        if output is not None:
            words = output.num_words
            slot.device_output[:words].copy_(self.runner.output[:words])
        slot.compute_done.record()

    def _copy_down(self, slot: CudaBatchSlot) -> None:
        with torch.cuda.stream(self._d2h):
            self._d2h.wait_event(slot.compute_done)
            slot.d2h_began.record()
            if slot.output is not None:
                words = slot.output.num_words
                slot.host_output[:words].copy_(slot.device_output[:words], non_blocking=True)
            slot.d2h_done.record()

    # ---------------------------------------------------------------- what was when

    def record_spans(self, on: bool) -> None:
        """Whether steps launched from now on are recorded."""
        self._records = on

    def take_spans(self) -> list[DeviceSpan]:
        """Recorded spans of the steps that are over, each handed out once."""
        for slot in self._slots:
            if slot.d2h_done.query():
                self._take_spans_of(slot)
        spans, self._spans = self._spans, []
        return spans

    def _take_spans_of(self, slot: CudaBatchSlot) -> None:
        if slot.recorded:
            assert self._base is not None
            self._spans += slot.spans(*self._base)
            slot.recorded = False

    def renew(self, make_forward: Callable[[], Forward]) -> None:
        """Take another step function, and capture its graphs. To be called between uses."""
        self.runner.release()
        self.runner.forward = make_forward()
        self._mirror.forget()
        torch.cuda.synchronize(self.runner.loaded.device)
        self.runner.capture(self._compute)

    def close(self) -> None:
        """Let what was launched come to its end."""
        self._d2h.synchronize()
        self._compute.synchronize()

    def __enter__(self) -> CudaSlots:
        self._num_launched = self.num_sent = 0
        self._spans = []
        for slot in self._slots:
            slot.busy_seconds, slot.recorded = 0.0, False
        # Whose clock is whose: an event whose moment the host knows too.
        event = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._compute):
            event.record()
        event.synchronize()
        self._base = event, time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _most_words(runner: CudaRunner) -> int:
    """The most that a decode step sends: every slot whole, or a block for every place."""
    return len(runner.state.rows) + runner.num_slots * (1 + 2 * runner.state.words.shape[1])
