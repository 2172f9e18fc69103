"""Which layers of a loaded model see how far back: asked of the model itself, not of its configuration.

Knows the attention function's arguments; refuses to know blocks and sequences.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from pipeline.models.attention import AttentionContext, AttentionOptions, CpuAttentionContext, GroupContext
from pipeline.models.cpu_attention import plan_tensors
from pipeline.models.load import LoadedModel


class _OptionsProbe:
    """Attends to nothing and notes what each layer asks for."""

    def __init__(self) -> None:
        self.options_of: dict[int, AttentionOptions] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        self.options_of[layer] = options
        return torch.zeros_like(query)


@torch.inference_mode()
def layer_options(loaded: LoadedModel) -> dict[int, AttentionOptions]:
    """What each layer asks of its attention."""
    probe = _OptionsProbe()
    _forward(loaded, 16, probe)
    return dict(sorted(probe.options_of.items()))


def layers_by_window(loaded: LoadedModel) -> dict[int | None, tuple[int, ...]]:
    """Layers of each group, by sliding window (None: full attention), the full ones first."""
    windows = {layer: options.window for layer, options in layer_options(loaded).items()}
    return {
        window: tuple(layer for layer, w in windows.items() if w == window)
        for window in sorted(set(windows.values()), key=lambda w: (w is not None, w))
    }


@torch.inference_mode()
def logits_of_equal_rows(loaded: LoadedModel, num_rows: int) -> torch.Tensor:
    """Run num_rows equal rows of one token each, on the CPU: logits [num_rows, V]."""
    a = loaded.architecture
    size = (num_rows, a.num_kv_heads, 1, a.head_dim)
    keys, values = ([torch.zeros(size, dtype=loaded.dtype) for _ in range(a.num_layers)] for _ in range(2))
    rows = np.arange(num_rows, dtype=np.int32)
    plans = plan_tensors(
        np.zeros_like(rows),
        np.ones_like(rows),
        rows[:, None],
        block_size=1,
        group_size=a.num_heads // a.num_kv_heads,
        window=None,
    )
    # With one token a row, every window sees the same.
    group = GroupContext(torch.arange(num_rows), plans)
    return _forward(loaded, num_rows, CpuAttentionContext(keys, values, defaultdict(lambda: group)))


def _forward(loaded: LoadedModel, num_rows: int, context: AttentionContext) -> torch.Tensor:
    ids = torch.full((1, num_rows), min(7, loaded.vocab_size - 1), device=loaded.device)
    return loaded.model(
        input_ids=ids,
        position_ids=torch.zeros_like(ids),
        use_cache=False,
        logits_to_keep=torch.arange(num_rows, device=loaded.device),
        tokenmill=context,
    ).logits[0]
