"""Runs steps of the model on a GPU: eagerly, or by replaying a CUDA graph captured beforehand.

A step of decoding rows only is padded to one of a few sizes and replayed: its inputs, which the device
makes from what it knows of every sequence slot, the forward, the choice of ids with everything recorded
beside them, and the carry-over are all inside the graph. Rows whose logits the host must edit (penalties,
bias, bad words) leave the graph at the logits. Steps with prompt chunks run without a graph, from inputs
that the host sends. Knows device tensors and graphs; refuses to know streams, which `cuda_slots.py` sets,
and sequences.

Shapes: T = tokens, R = rows, N = sampled rows, S = sequence slots, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.engine.batch import StepInputs
from pipeline.engine.cuda_graphs import GraphKey, StepEnd, StepGraphs
from pipeline.engine.cuda_sampler import CudaSampler, RowParameters
from pipeline.engine.kv_cache import KVCache
from pipeline.engine.sampler import Sampled
from pipeline.engine.sampling_inputs import SamplingInputs
from pipeline.engine.slot_state import HEADER_WORDS, StateChanges, words_per_slot
from pipeline.engine.step_buffers import StepLayout, layout_of
from pipeline.engine.step_outputs import OutputLayout, output_layout
from pipeline.kernels.decode_inputs import (
    DecodeInputs,
    SlotState,
    allocate_decode_inputs,
    make_decode_inputs,
)
from pipeline.kernels.decode_plan import DecodeWorkspace, allocate_workspace
from pipeline.models.cuda_attention import CudaAttentionContext, CudaGroup, PromptKernel
from pipeline.models.forward import Forward
from pipeline.models.load import LoadedModel

Views = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepShape:
    """What a step is, before it runs. graph: the one to replay; None runs eagerly."""

    layout: StepLayout
    num_decode: int
    graph: GraphKey | None

    @property
    def is_made(self) -> bool:
        return self.graph is not None and self.graph.made


@dataclass
class CudaRunner:
    """model, cache and sampler of one GPU.

    graph_sizes: rows of the decode steps that are captured, sent_sizes: tokens of those with prompts, both
    ascending. invariant_sizes: under bitwise determinism, the token and row counts that steps are padded to;
    None pads nothing but replayed steps. prompt_kernels: what computes prompt chunks, by sliding window.
    """

    loaded: LoadedModel
    cache: KVCache
    sampler: CudaSampler
    forward: Forward
    windows: tuple[int | None, ...]
    blocks_per_row: int
    num_slots: int
    graph_sizes: tuple[int, ...]
    sent_sizes: tuple[int, ...] = ()
    invariant_sizes: tuple[int, ...] | None = None
    prompt_kernels: Mapping[int | None, PromptKernel] = field(default_factory=dict)
    state: SlotState = field(init=False)
    inputs: DecodeInputs = field(init=False)
    output: torch.Tensor = field(init=False)
    workspaces: dict[int | None, DecodeWorkspace] = field(init=False)
    graphs: StepGraphs = field(default_factory=StepGraphs)
    _sent: torch.Tensor | None = None
    _logits_buffer: torch.Tensor | None = None

    def __post_init__(self) -> None:
        a, device = self.loaded.architecture, self.loaded.device
        rows = max(self.num_slots, *self.graph_sizes, *(self.invariant_sizes or ()), 1)
        num_words = words_per_slot(len(self.windows), self.blocks_per_row)
        self.state = SlotState(
            torch.zeros((self.num_slots + 1, num_words), dtype=torch.int32, device=device),
            torch.zeros(self.num_slots + 1, dtype=torch.int64, device=device),
            torch.full((rows,), self.num_slots, dtype=torch.int32, device=device),
        )
        self.inputs = allocate_decode_inputs(rows, len(self.windows), self.blocks_per_row, device)
        self.output = torch.zeros(self.output_layout(rows).num_words, dtype=torch.int32, device=device)
        self.workspaces = {
            window: allocate_workspace(
                rows,
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

    def output_layout(self, num_rows: int) -> OutputLayout:
        return output_layout(num_rows, self.sampler.records, self.sampler.num_topk)

    def shape_of(self, inputs: StepInputs) -> StepShape:
        """How a step will run; its layout says how its inputs must lie if the host sends them."""
        rows, sampled, tokens = len(inputs.starts), len(inputs.logits_index), inputs.num_tokens
        decode = int((inputs.query_lens == 1).argmin()) if (inputs.query_lens > 1).any() else rows
        end = StepEnd.LOGITS if needs_logits(inputs.sampling) else StepEnd.SAMPLED
        graph = None
        if decode == rows and sampled == rows:
            graph = _smallest(self.graph_sizes, rows, True, end)
        if graph is None and end is StepEnd.SAMPLED:
            graph = _smallest(self.sent_sizes, tokens, False, end)
        if graph is not None and not graph.made:
            return StepShape(self._sent_layout(graph.size), 0, graph)
        if self.invariant_sizes is not None:
            # A row's bits must not depend on what runs beside it: attention too takes one way for all rows.
            decode, tokens, sampled = 0, self._invariant(tokens), self._invariant(max(sampled, 1))
        layout = layout_of(tokens, rows, sampled, self.blocks_per_row, self.windows)
        return StepShape(layout, decode, graph)

    def _invariant(self, count: int) -> int:
        assert self.invariant_sizes is not None
        return next(size for size in self.invariant_sizes if size >= count)

    def _sent_layout(self, num_tokens: int) -> StepLayout:
        """Of a captured step with prompts: room for every slot's row."""
        sampled = self.num_slots if self.invariant_sizes is None else self._invariant(self.num_slots)
        return layout_of(num_tokens, self.num_slots, sampled, self.blocks_per_row, self.windows)

    # ---------------------------------------------------------------- steps that the host sends

    def run(self, shape: StepShape, sent: torch.Tensor, inputs: StepInputs) -> OutputLayout | None:
        """Compute a step whose inputs lie in `sent`, on the current stream; None if nothing is sampled."""
        count = len(inputs.logits_index)
        if shape.graph is not None:
            assert self._sent is not None
            num_bytes = shape.layout.num_bytes
            self._sent[:num_bytes].copy_(sent[:num_bytes])
            self.graphs.replay(shape.graph)
            return self.output_layout(shape.layout.num_sampled) if count else None
        views = shape.layout.tensors(sent)
        logits = self._sent_logits(views, shape.num_decode)
        if not count:
            return None
        parameters = RowParameters(*(views[name][:count] for name in RowParameters._fields))
        last_ids = views["input_ids"][views["logits_index"][:count]]
        sampled = self._sample(logits[:count], parameters, last_ids, inputs)
        return self._put(sampled, views["sample_slots"][:count])

    def _sent_logits(self, views: Views, num_decode: int) -> torch.Tensor:
        """Carry-over, the slots' new positions, and the forward: logits [N, V]."""
        carried, ids = views["carry_slots"], views["input_ids"]
        ids.copy_(torch.where(carried >= 0, self.state.last_ids[carried.clamp(min=0)], ids))
        self.state.words[:, 0].index_copy_(0, views["slots"], views["next_positions"])
        return self.logits(ids, views["positions"], self.context(views, num_decode), views["logits_index"])

    def _sample(
        self, logits: torch.Tensor, parameters: RowParameters, last_ids: torch.Tensor, inputs: StepInputs
    ) -> Sampled:
        if needs_logits(inputs.sampling):
            return self.sampler.edited(logits, parameters, inputs.sampling, last_ids)
        return self.sampler(logits, parameters)

    def _put(self, sampled: Sampled, sample_slots: torch.Tensor) -> OutputLayout:
        """Keep the ids for the next step, and all of the result where the host will fetch it."""
        self.state.last_ids.index_copy_(0, sample_slots, sampled.ids)
        layout = self.output_layout(len(sampled.ids))
        layout.write(self.output, sampled)
        return layout

    def logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        context: CudaAttentionContext,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """The forward of one step: logits [N, V] in the model's type; of one row if none is wanted."""
        context.plan()
        if not len(wanted):
            wanted = torch.zeros(1, dtype=torch.int64, device=ids.device)
        return self.forward(ids, positions, context, wanted)

    def context(self, views: Views, num_decode: int) -> CudaAttentionContext:
        groups = {
            window: CudaGroup(views[f"slot_mapping{i}"], views[f"block_tables{i}"], self.workspaces[window])
            for i, window in enumerate(self.windows)
        }
        return CudaAttentionContext(
            self.cache.keys,
            self.cache.values,
            groups,
            num_decode,
            views["context_lens"],
            views["query_start_loc"],
            views["starts"],
            self.prompt_kernels,
        )

    # ---------------------------------------------------------------- steps that the device makes

    def apply(self, changes: StateChanges, sent: torch.Tensor) -> None:
        """Take in what the host sent of a decode step: int32, as `pack` laid it."""
        begin = 0
        if changes.rows is not None:
            begin = len(changes.rows)
            self.state.rows[:begin].copy_(sent[:begin])
        if len(changes.slots):
            stop = begin + len(changes.slots)
            words = sent[stop : stop + changes.words.size].view(changes.words.shape)
            self.state.words.index_copy_(0, sent[begin:stop].long(), words)
            begin = stop + changes.words.size
        if len(changes.places):
            stop = begin + len(changes.places)
            self.state.words.view(-1).index_copy_(
                0, sent[begin:stop].long(), sent[stop : stop + stop - begin]
            )

    def replay(self, shape: StepShape, inputs: StepInputs) -> OutputLayout:
        """Compute a step of decoding rows of the slots in state.rows, on the current stream."""
        assert shape.graph is not None and shape.graph.made
        self.graphs.replay(shape.graph)
        if shape.graph.end is StepEnd.SAMPLED:
            return self.output_layout(shape.graph.size)
        assert self._logits_buffer is not None
        rows = self.inputs.first(len(inputs.slots))
        logits = self._logits_buffer[: len(inputs.slots)]
        return self._put(self._sample(logits, _parameters(rows), rows.input_ids, inputs), rows.sample_slots)

    # ---------------------------------------------------------------- graphs

    def release(self) -> None:
        """Let go of the step function and of all graphs, so that their memory is free for new ones."""

        def gone(*_: object) -> torch.Tensor:
            raise AssertionError("the runner has no step function at the moment")

        self.graphs.clear()
        self.forward = gone

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture every size, the largest first: one pool serves all."""
        for size in sorted(self.sent_sizes, reverse=True):
            self.capture_one(GraphKey(False, size, StepEnd.SAMPLED), stream)
        for size in sorted(self.graph_sizes, reverse=True):
            self.capture_one(GraphKey(True, size, StepEnd.SAMPLED), stream)

    @torch.inference_mode()
    def capture_one(self, key: GraphKey, stream: torch.cuda.Stream) -> None:
        """Capture one step. Nothing else may run on the device. What the host sent before is kept."""
        with torch.cuda.stream(stream):
            rows = self.state.rows.clone()
            self.state.rows.fill_(self.num_slots)
            # Once without capture: kernels are compiled and libraries make their handles now.
            self.compute_padding(key)
        self.graphs.capture(key, lambda: self.compute(key), stream)
        with torch.cuda.stream(stream):
            self.state.rows.copy_(rows)
        stream.synchronize()

    def compute_padding(self, key: GraphKey) -> None:
        """What the graph will hold, once, for rows that nobody has."""
        if not key.made:
            _fill_with_padding(self._sent_views(key.size), self.num_slots)
        self.compute(key)

    def compute(self, key: GraphKey) -> None:
        """All of a captured step; its results go where `run` and `replay` find them."""
        if key.made:
            self._decode(key.size, key.end)
            return
        views = self._sent_views(key.size)
        parameters = RowParameters(*(views[name] for name in RowParameters._fields))
        self._put(self.sampler(self._sent_logits(views, 0), parameters), views["sample_slots"])

    def _sent_views(self, num_tokens: int) -> Views:
        """Where a captured step finds what the host sent: the same memory for all sizes."""
        if self._sent is None:
            num_bytes = max(self._sent_layout(size).num_bytes for size in self.sent_sizes)
            self._sent = torch.zeros(num_bytes, dtype=torch.uint8, device=self.loaded.device)
        return self._sent_layout(num_tokens).tensors(self._sent)

    def _decode(self, size: int, end: StepEnd) -> None:
        """All of a decode step of the slots state.rows[:size]; results go where `replay` finds them."""
        inputs = self.inputs.first(size)
        make_decode_inputs(self.state, inputs, self.cache.block_size, HEADER_WORDS)
        logits = self.logits(
            inputs.input_ids,
            inputs.positions,
            self._decode_context(inputs),
            torch.arange(size, device=inputs.input_ids.device),
        )
        if end is StepEnd.LOGITS:
            self._logits_kept(logits)[:size].copy_(logits)
        else:
            self._put(self.sampler(logits, _parameters(inputs)), inputs.sample_slots)

    def _decode_context(self, inputs: DecodeInputs) -> CudaAttentionContext:
        groups = {
            window: CudaGroup(inputs.slot_mapping[i], inputs.block_tables[i], self.workspaces[window])
            for i, window in enumerate(self.windows)
        }
        return CudaAttentionContext(
            self.cache.keys,
            self.cache.values,
            groups,
            len(inputs.input_ids) if self.invariant_sizes is None else 0,
            inputs.context_lens,
            inputs.query_start_loc,
            inputs.starts,
        )

    def _logits_kept(self, like: torch.Tensor) -> torch.Tensor:
        """One buffer for all sizes: each graph's own would be kept as long as the graph."""
        if self._logits_buffer is None:
            shape = (max(self.graph_sizes), like.shape[1])
            self._logits_buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self._logits_buffer


def _smallest(sizes: tuple[int, ...], count: int, made: bool, end: StepEnd) -> GraphKey | None:
    """The graph of the first size that holds `count`."""
    size = next((size for size in sizes if size >= count), None)
    return None if size is None else GraphKey(made, size, end)


def _fill_with_padding(views: Views, scratch_slot: int) -> None:
    for name, view in views.items():
        view.fill_(-1 if name.startswith("slot_mapping") or name == "carry_slots" else 0)
    for name in ("sample_slots", "slots"):
        views[name].fill_(scratch_slot)


def _parameters(inputs: DecodeInputs) -> RowParameters:
    return RowParameters(*(getattr(inputs, name) for name in RowParameters._fields))


def needs_logits(sampling: SamplingInputs) -> bool:
    """Whether the host edits some row's logits before the choice."""
    return (
        sampling.history is not None
        or sampling.bias is not None
        or sampling.bad_words is not None
        or len(sampling.forbidden) > 0
    )


def pack(changes: StateChanges, buffer: np.ndarray) -> int:
    """Lay what a decode step sends into int32 `buffer`, as `CudaRunner.apply` reads it; how many words."""
    pieces = [] if changes.rows is None else [changes.rows]
    pieces += [changes.slots, changes.words.reshape(-1), changes.places, changes.blocks]
    end = 0
    for piece in pieces:
        buffer[end : end + len(piece)] = piece
        end += len(piece)
    return end
