"""Which kernel computes the prompt chunks of each layer group: asked of the kernels, not assumed.

Decoding rows always go through our own split-KV kernel. Knows the model's layers and what the kernels
take; refuses to know steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.config import AttentionKernel
from pipeline.kernels.flash_attention import flash_package, why_not_flash
from pipeline.models.attention import AttentionOptions
from pipeline.models.cuda_attention import PromptKernel
from pipeline.models.layers import layer_options
from pipeline.models.load import LoadedModel


@dataclass(frozen=True)
class KernelChoice:
    """kernels: by sliding window, Triton's where nothing is said. words: the choice and why, for the log."""

    kernels: Mapping[int | None, PromptKernel]
    words: str


def choose_prompt_kernels(
    loaded: LoadedModel, wanted: AttentionKernel, block_size: int, bitwise: bool = False
) -> KernelChoice:
    """FlashAttention-3 for the layer groups that it computes right, unless `wanted` is another.

    bitwise: only our own kernel keeps a row's result apart from its neighbours'. ValueError if
    FlashAttention-3 is demanded and cannot be had for some layer.
    """
    if bitwise:
        assert wanted is not AttentionKernel.flash_attention_3, "the configuration refuses this"
        return KernelChoice({}, "triton (bitwise)")
    if wanted is AttentionKernel.triton:
        return KernelChoice({}, "triton (as configured)")
    groups: dict[int | None, list[AttentionOptions]] = {}
    for options in layer_options(loaded).values():
        groups.setdefault(options.window, []).append(options)
    reasons = {window: _why_not(loaded, block_size, found) for window, found in groups.items()}
    refused = {window: reason for window, reason in reasons.items() if reason is not None}
    if refused and wanted is AttentionKernel.flash_attention_3:
        raise ValueError(
            f"engine.attention_kernel=flash_attention_3 cannot be had: {_listed(refused)}; a build without "
            f"split pages needs engine.block_size=128 (now {block_size}); or use engine.attention_kernel=auto"
        )
    kernels = {window: PromptKernel.flash_attention_3 for window in groups if window not in refused}
    words = [] if not kernels else [f"flash_attention_3 of {flash_package().__name__}"]  # type: ignore[union-attr]
    if refused:
        words.append(f"triton (not flash_attention_3: {_listed(refused)})")
    return KernelChoice(kernels, ", ".join(words))


def _why_not(loaded: LoadedModel, block_size: int, layers: list[AttentionOptions]) -> str | None:
    if any(options.sinks is not None for options in layers):
        return "it knows no sinks"
    a = loaded.architecture
    kinds = {(options.scale, options.softcap): options for options in layers}
    reasons = (
        why_not_flash(
            a.num_heads,
            a.num_kv_heads,
            a.head_dim,
            block_size,
            loaded.dtype,
            loaded.device,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
        )
        for options in kinds.values()
    )
    return next((reason for reason in reasons if reason is not None), None)


def _listed(refused: Mapping[int | None, str]) -> str:
    """The reasons, each once; with the layers it holds for where they differ."""
    if len(set(refused.values())) == 1:
        return next(iter(refused.values()))
    return "; ".join(
        f"{'full attention' if window is None else f'window {window}'}: {reason}"
        for window, reason in refused.items()
    )
