"""Two batches in turn on a GPU: three streams, two slots, events between them.

Inputs go up on one stream, compute runs on another, results come down on a third; none of them is
the default stream. Events order them on the device; the host waits for nothing but the event behind
a result's copy, and sleeps while it waits. While batch N computes, the host prepares batch N+1 and
enqueues it: the device goes from one to the other without asking.

Knows streams, events and pinned memory; refuses to know what a step computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pipeline.engine.batch import StepInputs
from pipeline.engine.cuda_runner import CudaRunner, StepShape
from pipeline.engine.model_runner import StepOutput
from pipeline.engine.sampler import Sampled
from pipeline.engine.step_buffers import StepLayout, fill


class CudaBatchSlot:
    """Pinned host memory, device memory and the events of one of the two batches.

    h2d_done, compute_done, d2h_done: where the slot's step is. What the host reads lies in pinned
    tensors that `result` hands out as arrays of their own.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.array = self.host.numpy()
        self.h2d_done = torch.cuda.Event()
        self.compute_began = torch.cuda.Event(enable_timing=True)
        self.compute_done = torch.cuda.Event(enable_timing=True)
        # blocking: the host sleeps instead of spinning, and leaves the core to whoever prepares batches.
        self.d2h_done = torch.cuda.Event(blocking=True)
        self.outputs: Sequence[torch.Tensor | None] = ()
        self.padded: int | None = None
        # By padded size, None for steps without a graph: how many, and their seconds on the device.
        self.spent: dict[int | None, tuple[int, float]] = {}

    def result(self) -> StepOutput:
        """Wait for the copy of the step's result, and for nothing else."""
        self.d2h_done.synchronize()
        steps, seconds = self.spent.get(self.padded, (0, 0.0))
        took = self.compute_began.elapsed_time(self.compute_done) / 1e3
        self.spent[self.padded] = steps + 1, seconds + took
        ids, logprobs, topk_ids, topk_logprobs = (
            None if tensor is None else tensor.numpy().copy() for tensor in self.outputs
        )
        assert ids is not None
        return StepOutput(
            ids.astype(np.int32),
            logprobs,
            None if topk_ids is None else topk_ids.astype(np.int32),
            topk_logprobs,
        )


class CudaSlots:
    """Launches steps in order, each after the one before, the two slots in turn.

    A slot is used again only after its last result was taken, so its memory is free by then.
    """

    def __init__(self, runner: CudaRunner, largest: StepLayout) -> None:
        device = runner.loaded.device
        self._runner = runner
        self._h2d, self._compute, self._d2h = (torch.cuda.Stream(device) for _ in range(3))
        self._slots = tuple(CudaBatchSlot(largest.num_bytes, device) for _ in range(2))
        self._next = 0
        self._pinned: list[dict[tuple[str, tuple[int, ...]], torch.Tensor]] = [{}, {}]
        # What was allocated and filled so far was so on the default stream.
        torch.cuda.synchronize(device)
        for number, slot in enumerate(self._slots):
            runner.capture(number, slot.device, self._compute)

    @property
    def busy_seconds(self) -> float:
        """Time the compute stream had a step in work, results taken so far."""
        return sum(seconds for slot in self._slots for _, seconds in slot.spent.values())

    @property
    def spent(self) -> dict[int | None, tuple[int, float]]:
        """Steps and device seconds by padded size since entered; None: steps without a graph."""
        total: dict[int | None, tuple[int, float]] = {}
        for slot in self._slots:
            for padded, (steps, seconds) in slot.spent.items():
                before = total.get(padded, (0, 0.0))
                total[padded] = before[0] + steps, before[1] + seconds
        return total

    @torch.inference_mode()
    def launch(self, inputs: StepInputs) -> CudaBatchSlot:
        """Enqueue copy up, compute and copy down; return at once."""
        runner, number = self._runner, self._next
        slot, self._next = self._slots[number], 1 - number
        shape = runner.shape_of(inputs)
        layout, slot.padded = shape.layout, shape.padded
        if shape.padded is not None and (number, shape.padded, shape.end) not in self._runner.graphs:
            self._capture_late(slot, number, shape)
        fill(layout.arrays(slot.array), inputs, runner.windows, runner.num_slots)
        with torch.cuda.stream(self._h2d):
            slot.device[: layout.num_bytes].copy_(slot.host[: layout.num_bytes], non_blocking=True)
            slot.h2d_done.record()
        with torch.cuda.stream(self._compute):
            self._compute.wait_event(slot.h2d_done)
            slot.compute_began.record()
            sampled = runner.run(number, shape, layout.tensors(slot.device), inputs)
            slot.compute_done.record()
        with torch.cuda.stream(self._d2h):
            self._d2h.wait_event(slot.compute_done)
            slot.outputs = [self._copy_down(number, name, sampled) for name in _OUTPUTS]
            slot.d2h_done.record()
        return slot

    def _capture_late(self, slot: CudaBatchSlot, number: int, shape: StepShape) -> None:
        """Graphs that end at the logits are made when the first row asks for filters or records."""
        assert shape.padded is not None
        torch.cuda.synchronize(slot.device.device)
        self._runner.capture_one(number, shape.padded, shape.end, slot.device, self._compute)

    def _copy_down(self, number: int, name: str, sampled: Sampled) -> torch.Tensor | None:
        tensor = getattr(sampled, name)
        if tensor is None:
            return None
        # Sampled tensors belong to the compute stream: nobody may reuse them before they were read.
        tensor.record_stream(self._d2h)
        shape = (self._runner.num_slots, *tensor.shape[1:])
        buffers = self._pinned[number]
        if (name, shape) not in buffers:
            buffers[(name, shape)] = torch.empty(shape, dtype=tensor.dtype, pin_memory=True)
        host = buffers[(name, shape)][: len(tensor)]
        host.copy_(tensor, non_blocking=True)
        return host

    def close(self) -> None:
        """Let what was launched come to its end."""
        self._d2h.synchronize()
        self._compute.synchronize()

    def __enter__(self) -> CudaSlots:
        for slot in self._slots:
            slot.spent = {}
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_OUTPUTS = ("ids", "logprobs", "topk_ids", "topk_logprobs")
