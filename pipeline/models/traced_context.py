"""A step's attention as torch.compile sees it: one operator that it does not look into.

`tokenmill::paged_step` writes a layer's keys and values and attends, as CudaAttentionContext does. All it
needs comes as tensors and numbers; the compiler fuses what lies between two calls of it. Knows what the
compiler would take for constants; refuses to know models.

Shapes: T = tokens, R = rows, Hq = query heads, D = head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.decorators import mark_dynamic, mark_unbacked

from pipeline.kernels.decode_plan import DecodeWorkspace
from pipeline.kernels.launch import DecodeLaunch
from pipeline.models.attention import AttentionOptions
from pipeline.models.cuda_attention import CudaAttentionContext, CudaGroup, PromptKernel

# Where the compiler keeps what mark_unbacked told it.
_MARK = "_dynamo_unbacked_indices"


@torch.library.custom_op("tokenmill::paged_step", mutates_args=("keys", "values"))
def paged_step(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    scratch: list[torch.Tensor],
    launch: list[int],
    num_decode: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    starts: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    prompt_kernel: str,
) -> torch.Tensor:
    """CudaAttentionContext.attend for one layer; arguments as there, query [T, Hq, D] -> [T, Hq, D].

    scratch, launch: the decode workspace's tensors and numbers. What is written to scratch is read by
    nobody after the call, so it counts as no result. num_decode: int64 [] on the CPU, because a number
    would be compiled in.
    """
    context = CudaAttentionContext(
        [keys],
        [values],
        {window: CudaGroup(slot_mapping, block_tables, _workspace(scratch, launch))},
        int(num_decode),
        context_lens,
        query_start_loc,
        starts,
        {window: PromptKernel(prompt_kernel)},
    )
    return context.attend(0, query, new_keys, new_values, AttentionOptions(scale, window, softcap, sinks))


@paged_step.register_fake
def _(query: torch.Tensor, *args: Any) -> torch.Tensor:
    return query.new_empty(query.shape)


def _numbers(workspace: DecodeWorkspace) -> list[int]:
    launch = workspace.launch
    return [
        launch.block_n,
        launch.num_warps,
        launch.num_stages,
        launch.programs_per_sm,
        launch.min_split_tiles,
        workspace.batch_splits,
        int(workspace.bitwise),
    ]


def _scratch(workspace: DecodeWorkspace) -> list[torch.Tensor]:
    w = workspace
    return [w.items, w.num_items, w.partials, w.maxima, w.totals, w.arrivals]


def _workspace(scratch: list[torch.Tensor], numbers: list[int]) -> DecodeWorkspace:
    *launch, batch_splits, bitwise = numbers
    items, num_items, partials, maxima, totals, arrivals = scratch
    return DecodeWorkspace(
        items,
        num_items,
        partials,
        maxima,
        totals,
        arrivals,
        launch=DecodeLaunch(*launch),
        batch_splits=batch_splits,
        bitwise=bool(bitwise),
    )


@dataclass(frozen=True)
class _TracedGroup:
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    scratch: list[torch.Tensor]
    launch: list[int]
    prompt_kernel: str


@dataclass(frozen=True)
class TracedContext:
    """The step's context as the compiler sees it: tensors, numbers, and the operator."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    groups: dict[int | None, _TracedGroup]
    num_decode: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    starts: torch.Tensor

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        group = self.groups[options.window]
        return paged_step(
            query,
            key,
            value,
            self.keys[layer],
            self.values[layer],
            group.slot_mapping,
            group.block_tables,
            group.scratch,
            group.launch,
            self.num_decode,
            self.context_lens,
            self.query_start_loc,
            self.starts,
            options.scale,
            options.window,
            options.softcap,
            options.sinks,
            group.prompt_kernel,
        )


def of_one_kind(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a tensor as it is made outside inference mode: others are another kind of input to
    the compiler, and worth a compilation. The engine's buffers are of this kind already."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def traced(context: CudaAttentionContext) -> TracedContext:
    """The same step for a compiled model. Its tensors are marked: sizes that change are no constants."""
    groups = {
        window: _TracedGroup(
            of_one_kind(group.slot_mapping),
            of_one_kind(group.block_tables),
            _scratch(group.workspace),
            _numbers(group.workspace),
            context.prompt_kernel(window).value,
        )
        for window, group in context.groups.items()
    }
    per_row = [of_one_kind(t) for t in (context.context_lens, context.query_start_loc, context.starts)]
    for per_token in (group.slot_mapping for group in groups.values()):
        mark_dynamic(per_token, 0)
    _hide_sizes(per_row, [0])
    _hide_sizes([group.block_tables for group in groups.values()], [0, 1])
    for cached in (context.keys, context.values, *(group.scratch for group in groups.values())):
        if not hasattr(cached[0], _MARK):  # they stay the same from step to step
            _hide_sizes(cached, [0])
    return TracedContext(
        context.keys,
        context.values,
        groups,
        torch.tensor(context.num_decode),
        *per_row,
    )


def _hide_sizes(tensors: list[torch.Tensor], dimensions: list[int]) -> None:
    """Only the operator looks at these sizes: not even a size of one is worth a graph of its own."""
    for tensor in tensors:
        mark_unbacked(tensor, dimensions)
