"""One way to call a model for a step, whoever walks its layers: transformers or our fused walk.

Knows the two; refuses to know buffers and graphs. For GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipeline.models.attention import AttentionOptions
from pipeline.models.cuda_attention import CudaAttentionContext
from pipeline.models.fused import FusedContext, FusedModel, fuse, why_not_fused

# (input_ids [T], positions [T], context, logits_index [N]) -> logits [N, V]
Forward = Callable[[torch.Tensor, torch.Tensor, CudaAttentionContext, torch.Tensor], torch.Tensor]


def make_forward(model: Any, fused: bool = True) -> tuple[Forward, str]:
    """The step function of a model, and in words which one it is and why."""
    reason = why_not_fused(model) if fused else "switched off"
    if reason is None:
        return _fused_forward(fuse(model)), "fused"
    return _transformers_forward(model), f"transformers' modules (not fused: {reason})"


def _transformers_forward(model: Any) -> Forward:
    def forward(
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: CudaAttentionContext,
        logits_index: torch.Tensor,
    ) -> torch.Tensor:
        return model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_index,
            tokenmill=context,
        ).logits[0]

    return forward


def _fused_forward(fused: FusedModel) -> Forward:
    scale = fused.scale

    def forward(
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: CudaAttentionContext,
        logits_index: torch.Tensor,
    ) -> torch.Tensor:
        def attend(layer: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
            return context.attend_written(layer, query, AttentionOptions(scale, window))

        slots = {window: group.slot_mapping for window, group in context.groups.items()}
        hidden = fused.forward(
            input_ids, positions, FusedContext(context.keys, context.values, slots, attend)
        )
        return fused.logits(hidden[logits_index])

    return forward
