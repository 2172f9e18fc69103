"""Runs steps of the model on a GPU: eagerly, or by replaying a CUDA graph captured beforehand.

A step of decoding rows only is padded to one of a few sizes and replayed: inputs, forward, greedy
or plain draw, and the carry-over of the sampled ids are all inside the graph. Rows that ask for
more (filters, penalties, log-probabilities) leave the graph at the logits and go through the
sampler. Steps with prompt chunks run without a graph. Knows device tensors and graphs; refuses to
know streams, which `cuda_slots.py` sets, and sequences.

Shapes: T = tokens, R = rows, N = sampled rows, S = sequence slots, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from pipeline.engine.batch import StepInputs
from pipeline.engine.kv_cache import KVCache
from pipeline.engine.sampler import Sampled, Sampler
from pipeline.engine.sampling_inputs import SamplingInputs
from pipeline.engine.step_buffers import StepLayout, layout_of
from pipeline.kernels.decode_plan import DecodeWorkspace, allocate_workspace
from pipeline.models.cuda_attention import CudaAttentionContext, CudaGroup
from pipeline.models.forward import Forward
from pipeline.models.load import LoadedModel

Views = dict[str, torch.Tensor]


class StepEnd(Enum):
    """Where a graph ends: with the likeliest ids, with drawn ones, or at the logits."""

    GREEDY = "greedy"
    DRAWN = "drawn"
    LOGITS = "logits"


@dataclass
class CapturedStep:
    """A graph, and where it leaves its result: ids int64 [R], or logits [R, V]."""

    graph: torch.cuda.CUDAGraph
    result: torch.Tensor


@dataclass(frozen=True)
class StepShape:
    """What a step is, before it runs. padded: rows of a replayed step; None runs eagerly."""

    layout: StepLayout
    num_decode: int
    padded: int | None
    end: StepEnd


@dataclass
class CudaRunner:
    """model, cache and sampler of one GPU.

    last_ids: int64 [S + 1], the id last sampled for each sequence slot; the last entry takes what
    padding samples.
    """

    loaded: LoadedModel
    cache: KVCache
    sampler: Sampler
    forward: Forward
    windows: tuple[int | None, ...]
    blocks_per_row: int
    num_slots: int
    graph_sizes: tuple[int, ...]
    last_ids: torch.Tensor = field(init=False)
    workspaces: dict[int | None, DecodeWorkspace] = field(init=False)
    graphs: dict[tuple[int, int, StepEnd], CapturedStep] = field(default_factory=dict)
    _pool: Any = None
    _logits_of: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        a, device = self.loaded.architecture, self.loaded.device
        self.last_ids = torch.zeros(self.num_slots + 1, dtype=torch.int64, device=device)
        self.workspaces = {
            window: allocate_workspace(
                max(self.num_slots, *self.graph_sizes, 1),
                a.num_heads,
                a.num_kv_heads,
                a.head_dim,
                max_context=self.blocks_per_row * self.cache.block_size,
                page_size=self.cache.block_size,
                dtype=self.loaded.dtype,
                device=device,
                bitwise=False,
            )
            for window in self.windows
        }

    def shape_of(self, inputs: StepInputs) -> StepShape:
        """How a step will run; its layout says how its inputs must lie."""
        rows, sampled = len(inputs.starts), len(inputs.logits_index)
        decode = int((inputs.query_lens == 1).argmin()) if (inputs.query_lens > 1).any() else rows
        padded = None
        if decode == rows and sampled == rows:
            padded = next((size for size in self.graph_sizes if size >= rows), None)
        size = (inputs.num_tokens, rows, sampled) if padded is None else (padded, padded, padded)
        layout = layout_of(*size, self.blocks_per_row, self.windows)
        return StepShape(layout, decode if padded is None else padded, padded, self._end(inputs.sampling))

    def _end(self, sampling: SamplingInputs) -> StepEnd:
        if self.sampler.records or not _is_plain(sampling):
            return StepEnd.LOGITS
        return StepEnd.DRAWN if (sampling.temperature > 0).any() else StepEnd.GREEDY

    def run(self, number: int, shape: StepShape, views: Views, inputs: StepInputs) -> Sampled:
        """Compute a step whose inputs lie in `views`, on the current stream. number: of the batch slot."""
        if shape.padded is not None:
            captured = self.graphs[(number, shape.padded, shape.end)]
            captured.graph.replay()
            result = captured.result[: len(inputs.logits_index)]
            return self._sample(result, views, inputs) if shape.end is StepEnd.LOGITS else Sampled(result)
        logits = self._logits(views, shape.num_decode)
        if not len(inputs.logits_index):
            return Sampled(torch.empty(0, dtype=torch.int64, device=self.loaded.device))
        return self._sample(logits, views, inputs)

    def _sample(self, logits: torch.Tensor, views: Views, inputs: StepInputs) -> Sampled:
        count = len(inputs.logits_index)
        last = views["input_ids"][views["logits_index"][:count]]
        sampled = self.sampler(logits, inputs.sampling, last)
        self.last_ids[views["sample_slots"][:count]] = sampled.ids
        return sampled

    def _logits(self, views: Views, num_decode: int) -> torch.Tensor:
        """Carry-over, then the forward of one step: logits [N, V]."""
        carried = views["carry_slots"]
        ids = views["input_ids"]
        ids.copy_(torch.where(carried >= 0, self.last_ids[carried.clamp(min=0)], ids))
        context = self._context(views, num_decode)
        context.plan()
        wanted = views["logits_index"]
        if not len(wanted):
            wanted = torch.zeros(1, dtype=torch.int64, device=ids.device)
        logits = self.forward(ids, views["positions"], context, wanted).float()
        if logits.shape[1] > self.loaded.vocab_size:
            logits[:, self.loaded.vocab_size :] = -torch.inf
        return logits

    def _context(self, views: Views, num_decode: int) -> CudaAttentionContext:
        return CudaAttentionContext(
            self.cache.keys,
            self.cache.values,
            {
                window: CudaGroup(
                    views[f"slot_mapping{i}"], views[f"block_tables{i}"], self.workspaces[window]
                )
                for i, window in enumerate(self.windows)
            },
            num_decode,
            views["context_lens"],
            views["query_start_loc"],
            views["starts"],
        )

    # ---------------------------------------------------------------- graphs

    def capture(self, number: int, buffer: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Capture every size for one batch slot's device buffer, the largest first: one pool serves all."""
        for size in sorted(self.graph_sizes, reverse=True):
            for end in (StepEnd.DRAWN, StepEnd.GREEDY):
                self.capture_one(number, size, end, buffer, stream)

    @torch.inference_mode()
    def capture_one(
        self, number: int, size: int, end: StepEnd, buffer: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        """Capture one step. Nothing else may run on the device: the buffer is overwritten with padding."""
        layout = layout_of(size, size, size, self.blocks_per_row, self.windows)
        views = layout.tensors(buffer)
        with torch.cuda.stream(stream):
            _fill_with_padding(views, self.num_slots)
            # Once without capture: kernels are compiled and libraries make their handles now.
            self._decode(number, views, end)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            result = self._decode(number, views, end)
        self._pool = graph.pool()
        self.graphs[(number, size, end)] = CapturedStep(graph, result)

    def _decode(self, number: int, views: Views, end: StepEnd) -> torch.Tensor:
        """All of a plain decode step: ids [R]; or, up to the sampler, logits [R, V]."""
        logits = self._logits(views, len(views["context_lens"]))
        if end is StepEnd.LOGITS:
            # One buffer for all sizes: each graph's own would be kept as long as the graph.
            return self._kept_logits(number, logits)[: len(logits)].copy_(logits)
        ids = logits.argmax(dim=-1)
        if end is StepEnd.DRAWN:
            ids = torch.where(views["temperature"] > 0, _draw_plain(logits, views), ids)
        self.last_ids.index_copy_(0, views["sample_slots"], ids)
        return ids

    def _kept_logits(self, number: int, like: torch.Tensor) -> torch.Tensor:
        if number not in self._logits_of:
            rows = max(self.graph_sizes)
            self._logits_of[number] = torch.empty((rows, like.shape[1]), dtype=like.dtype, device=like.device)
        return self._logits_of[number]


def _draw_plain(logits: torch.Tensor, views: Views) -> torch.Tensor:
    """The sampler's draw without filters: ids [N]. Greedy rows give any id."""
    temperature = views["temperature"].clamp(min=1e-30)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    cumulative = scaled.exp().cumsum(dim=-1, dtype=torch.float64)
    threshold = views["uniform"][:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    return ids.clamp(max=logits.shape[1] - 1)


def _is_plain(sampling: SamplingInputs) -> bool:
    """Whether every row is greedy or draws from the whole distribution, and nothing edits its logits."""
    return (
        sampling.history is None
        and sampling.bias is None
        and sampling.bad_words is None
        and not len(sampling.forbidden)
        and not (sampling.top_k > 0).any()
        and not (sampling.top_p < 1).any()
        and not (sampling.min_p > 0).any()
    )


def _fill_with_padding(views: Views, scratch_slot: int) -> None:
    for name, view in views.items():
        view.fill_(-1 if name.startswith("slot_mapping") or name == "carry_slots" else 0)
    views["sample_slots"].fill_(scratch_slot)
