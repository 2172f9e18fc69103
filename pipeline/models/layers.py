"""Which layers of a loaded model see how far back: asked of the model itself, not of its configuration.

Knows the attention function's arguments; refuses to know blocks and sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pipeline.models.attention import AttentionContext, GroupContext
from pipeline.models.cpu_attention import plan_tensors
from pipeline.models.load import LoadedModel


@dataclass(frozen=True)
class ProbeContext(AttentionContext):
    """A context of equal one-token rows that notes which window each layer asks for."""

    seen: dict[int, int | None] = field(default_factory=dict)

    def group(self, layer: int, window: int | None) -> GroupContext:
        self.seen[layer] = window
        return self.groups[None]


@torch.inference_mode()
def probe(loaded: LoadedModel, num_rows: int) -> tuple[torch.Tensor, dict[int, int | None]]:
    """Run num_rows equal rows of one token each: logits [num_rows, V], and the window by layer.

    With one token a row, every window sees the same; each row has a block of its own.
    """
    a = loaded.architecture
    size = (num_rows, a.num_kv_heads, 1, a.head_dim)
    keys, values = (
        [torch.zeros(size, dtype=loaded.dtype, device=loaded.device) for _ in range(a.num_layers)]
        for _ in range(2)
    )
    rows = np.arange(num_rows, dtype=np.int32)
    plans = plan_tensors(
        np.zeros_like(rows),
        np.ones_like(rows),
        rows[:, None],
        block_size=1,
        group_size=a.num_heads // a.num_kv_heads,
        window=None,
    )
    context = ProbeContext(keys, values, {None: GroupContext(torch.arange(num_rows), plans)})
    ids = torch.full((1, num_rows), min(7, loaded.vocab_size - 1), device=loaded.device)
    logits = loaded.model(
        input_ids=ids,
        position_ids=torch.zeros_like(ids),
        use_cache=False,
        logits_to_keep=torch.arange(num_rows, device=loaded.device),
        tokenmill=context,
    ).logits[0]
    return logits, context.seen


def layers_by_window(loaded: LoadedModel) -> dict[int | None, tuple[int, ...]]:
    """Layers of each group, by sliding window (None: full attention)."""
    _, windows = probe(loaded, 16)
    return {
        window: tuple(layer for layer, w in sorted(windows.items()) if w == window)
        for window in sorted(set(windows.values()), key=lambda w: (w is not None, w))
    }
