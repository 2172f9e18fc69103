"""The one attention function that every model calls, and the operator behind it.

A transformers model asks for its attention by name. Ours writes the new keys and values into the
paged cache and attends over it; both happen in one operator (`tokenmill::paged_attention`) that
`torch.compile` takes as a black box, so that it can fuse everything around it. Nothing global: the
step's context travels as a keyword argument, the layer is the module's own `layer_idx`.

Shapes: T = tokens, Hq = query heads, H = KV heads, D = head width, N = blocks, P = block size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import AttentionInterface

from pipeline.models import cpu_attention

ATTENTION_NAME = "tokenmill"
# Tensors of one tile plan; the operator takes the plans of a step as one flat list.
_TENSORS_PER_PLAN = 6


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks for. scale: of the scores. window: positions a query sees, itself included; None
    sees all. softcap: bound of the scores, by tanh. sinks: [Hq], logits of a key without a value."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionContext(Protocol):
    """What a step's attention needs to know, handed to the model as `tokenmill=`."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Write the new key and value [T, H, D] to the cache, attend: query [T, Hq, D] -> [T, Hq, D]."""
        ...


@dataclass(frozen=True)
class GroupContext:
    """What the layers of one group need to know of a step.

    slot_mapping: int64 [T], the KV position (block * P + offset) each token writes. plans: tensors
    of the step's tile plans, one after the other.
    """

    slot_mapping: torch.Tensor
    plans: list[torch.Tensor]


@dataclass(frozen=True)
class CpuAttentionContext:
    """A step on the CPU. keys, values: per layer [N, H, P, D]. groups: by sliding window."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    groups: dict[int | None, GroupContext]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        group = self.groups[options.window]
        return paged_attention(
            query.contiguous(),
            key,
            value,
            self.keys[layer],
            self.values[layer],
            group.slot_mapping,
            group.plans,
            options.scale,
            options.softcap,
            options.sinks,
        )


@torch.library.custom_op("tokenmill::paged_attention", mutates_args=("keys", "values"))
def paged_attention(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    plans: list[torch.Tensor],
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [T, Hq, D], new_keys and new_values [T, H, D], keys and values [N, H, P, D] -> [T, Hq, D]."""
    block_size = keys.shape[2]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    keys[block, :, offset] = new_keys
    values[block, :, offset] = new_values
    # Padding tokens belong to no tile and stay zero.
    out = torch.zeros_like(query)
    for i in range(0, len(plans), _TENSORS_PER_PLAN):
        plan = plans[i : i + _TENSORS_PER_PLAN]
        cpu_attention.attend(query, keys, values, plan, out, scale=scale, softcap=softcap, sinks=sinks)
    return out


@paged_attention.register_fake
def _(query: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(query)


def tokenmill_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    tokenmill: AttentionContext | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, Hq, T, D], key and value [1, H, T, D] -> [1, T, Hq, D]."""
    if tokenmill is None:
        raise ValueError("the attention 'tokenmill' needs the engine's context: call the model through it")
    out = tokenmill.attend(
        cast(int, module.layer_idx),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionOptions(
            query.shape[-1] ** -0.5 if scaling is None else float(scaling), sliding_window, softcap, s_aux
        ),
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, tokenmill_attention)
