"""One way to call a model for a step, whoever walks its layers: transformers, compiled or not, or our
fused walk.

Knows the three; refuses to know buffers and graphs. For GPUs.
"""

from __future__ import annotations

import torch

from pipeline.models.attention import AttentionOptions
from pipeline.models.compiled import (
    CompileRefused,
    Forward,
    PromptKernels,
    compile_forward,
    transformers_step,
)
from pipeline.models.cuda_attention import CudaAttentionContext
from pipeline.models.fused import FusedContext, FusedModel, fuse, why_not_fused
from pipeline.models.load import LoadedModel

__all__ = ["Forward", "make_forward"]


def make_forward(
    loaded: LoadedModel,
    fused: bool = True,
    compiled: bool | None = False,
    block_size: int = 32,
    prompt_kernels: PromptKernels | None = None,
) -> tuple[Forward, str]:
    """The step function of a model, and in words which one it is and why.

    compiled: whether a model that is not fused goes through torch.compile; None tries, and leaves the
    model as it is where that fails. block_size, prompt_kernels: what steps will come with. ValueError if
    compiling is demanded and fails.
    """
    not_fused = why_not_fused(loaded.model) if fused else "switched off"
    if not_fused is None:
        return _fused_forward(fuse(loaded.model)), "fused"
    eager, words = transformers_step(loaded.model), f"transformers' modules (not fused: {not_fused}"
    if compiled is False:
        return eager, f"{words}; not compiled: switched off)"
    try:
        return compile_forward(loaded, block_size, eager, prompt_kernels or {}), f"compiled {words})"
    except CompileRefused as error:
        if compiled:
            raise ValueError(
                f"engine.compile=true: {type(loaded.model).__name__} cannot be compiled as one graph: "
                f"{error}; use engine.compile=null or false"
            ) from error
        return eager, f"{words}; not compiled: {error})"


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
