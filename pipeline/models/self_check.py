"""Proof before the weights are read: a doll of the model must give eager's logits.

A doll is the same architecture with small sizes and random weights. Two rows run packed through
the engine's attention, one of them past the sliding window and past the RoPE's original range,
and each alone through transformers' eager attention. Whatever a configuration hides (a mask of
its own, chunked attention, frequencies that depend on the batch), it shows here.

Knows configurations and random weights; refuses to know real ones, but for quantised models: what
their layers compute (scales over the whole batch, say) no doll shows.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pipeline.models.architecture import Architecture, UnsupportedModel, read_architecture, rope_range
from pipeline.models.attention import ATTENTION_NAME, CpuAttentionContext, GroupContext
from pipeline.models.cpu_attention import plan_tensors

_ROW_LENGTHS = (7, 53)
_ORIGINAL_RANGE = 24
_WINDOW = 16
_BLOCK_SIZE = 16
_VOCABULARY = 96
# Tokens of each row that are computed in a second step.
_LAST_STEP = 4
# Share of the largest logit. Right ones were off by 2e-4 and less (float32, 30 families), wrong masks and
# frequencies by 1e-2 and more.
_TOLERANCE = 1e-3
# In half types, eager itself is off by more than that.
_HALF_TOLERANCE = 5e-2
_REAL_ROW_LENGTHS = (5, 12)


def check_architecture(
    config: Any, max_model_len: int | None = None, trust_remote_code: bool = False
) -> None:
    """Raise UnsupportedModel, naming the way out, unless a doll of the model equals eager.

    max_model_len: rows stay within it; None takes the configuration's own range.
    """
    try:
        difference = _largest_difference(_doll_config(config, max_model_len), trust_remote_code)
    except UnsupportedModel:
        raise
    except Exception as error:  # an architecture may fail in any way at all: that is the answer
        raise UnsupportedModel(
            f"model.path: {config.model_type} does not run through the engine's attention "
            f"({type(error).__name__}: {error}); engine=transformers may run it"
        ) from error
    if not difference <= _TOLERANCE:
        raise UnsupportedModel(
            f"model.path: {config.model_type} gives other logits through the engine's attention than through "
            f"transformers' eager one (a small random model is {difference:.2%} off): it would generate "
            "wrong text; engine=transformers may run it"
        )


def check_step_equals_eager(model: Any, architecture: Architecture) -> None:
    """The same on a loaded model and two short rows; ValueError if a row depends on its neighbour."""
    difference = _difference_to_eager(model, _REAL_ROW_LENGTHS, architecture)
    tolerance = _TOLERANCE if model.dtype == torch.float32 else _HALF_TOLERANCE
    if not difference <= tolerance:
        raise UnsupportedModel(
            f"model.path: the loaded {model.config.model_type} gives other logits for packed rows than for "
            f"each alone ({difference:.2%} off): its quantised layers look at the whole batch; take an "
            "unquantised checkpoint, or engine=transformers may run it"
        )


def _doll_config(config: Any, max_model_len: int | None = None) -> Any:
    doll = copy.deepcopy(config)
    a = read_architecture(config, max_model_len)
    group = max(1, a.num_heads // a.num_kv_heads)
    kv_heads = min(a.num_kv_heads, 2)
    sizes = {
        "num_hidden_layers": _num_layers(config),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "hidden_size": kv_heads * group * a.head_dim,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": _VOCABULARY,
        "sliding_window": _WINDOW,
        # Larger than usual, so that a wrong mask cannot hide behind small logits.
        "initializer_range": 0.2,
    }
    for name, value in sizes.items():
        if getattr(doll, name, None) is not None:
            setattr(doll, name, value)
    # The doll's weights are plain ones.
    if hasattr(doll, "quantization_config"):
        del doll.quantization_config
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if hasattr(doll, name):
            setattr(doll, name, None)
    if getattr(doll, "layer_types", None):
        doll.layer_types = doll.layer_types[: doll.num_hidden_layers]
    # Where rows never leave the original range, the doll's do not either.
    static = rope_range(config)
    within = static is not None and a.max_position <= static
    _shrink_rope(doll, max(_ROW_LENGTHS) + 1 if within else _ORIGINAL_RANGE)
    return doll


def _num_layers(config: Any) -> int:
    """Enough layers to meet every type there is."""
    types = list(getattr(config, "layer_types", None) or ())
    return (
        max([2] + [types.index(kind) + 1 for kind in set(types)])
        if types
        else min(2, config.num_hidden_layers)
    )


def _shrink_rope(doll: Any, range_: int) -> None:
    """Scale the RoPE's original range down to so many positions, and all that grew out of it."""
    parameters = getattr(doll, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings")
    if original:
        doll.max_position_embeddings = max(
            range_ * doll.max_position_embeddings // original, max(_ROW_LENGTHS) + 1
        )
        parameters["original_max_position_embeddings"] = range_
        if getattr(doll, "original_max_position_embeddings", None):
            doll.original_max_position_embeddings = range_


def _largest_difference(config: Any, trust_remote_code: bool) -> float:
    """How far the engine's logits are from eager's, as a share of the largest logit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=trust_remote_code
        ).eval()
        # Biases, norms and gates start as zeros and ones, behind which a mask of the model's own can hide.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return _difference_to_eager(model, _ROW_LENGTHS, read_architecture(config, max(_ROW_LENGTHS)))


def _difference_to_eager(model: Any, lengths: tuple[int, ...], a: Architecture) -> float:
    """The model is left with the engine's attention."""
    vocabulary = min(_VOCABULARY, a.vocab_size)
    rows = [torch.arange(n) * 7 % vocabulary for n in lengths]
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
        model.set_attn_implementation(ATTENTION_NAME)
        got = _paged_logits(model, rows, a)
    difference = max(float((g - e).abs().max()) for g, e in zip(got, expected, strict=True))
    return difference / max(float(e.abs().max()) for e in expected)


def _paged_logits(model: Any, rows: list[torch.Tensor], a: Architecture) -> list[torch.Tensor]:
    """Logits of each row, all rows packed, in two steps: what a model keeps outside K/V is lost between."""
    lengths = np.array([len(row) for row in rows], np.int32)
    num_blocks = -(-lengths // _BLOCK_SIZE)
    tables = np.zeros((len(rows), num_blocks.max()), np.int32)
    for r, count in enumerate(num_blocks):
        tables[r, :count] = 1 + num_blocks[:r].sum() + np.arange(count)
    size = (1 + int(num_blocks.sum()), a.num_kv_heads, _BLOCK_SIZE, a.head_dim)
    keys, values = ([torch.zeros(size, dtype=model.dtype) for _ in range(a.num_layers)] for _ in range(2))
    logits: list[list[torch.Tensor]] = [[] for _ in rows]
    for starts, stops in ((np.zeros_like(lengths), lengths - _LAST_STEP), (lengths - _LAST_STEP, lengths)):
        positions = [torch.arange(int(b), int(e)) for b, e in zip(starts, stops, strict=True)]
        slots = [
            torch.from_numpy(tables[r].astype(np.int64))[p // _BLOCK_SIZE] * _BLOCK_SIZE + p % _BLOCK_SIZE
            for r, p in enumerate(positions)
        ]
        groups = _Groups(torch.cat(slots), starts, stops - starts, tables, a)
        context = CpuAttentionContext(keys, values, groups)
        packed = model(
            input_ids=torch.cat([row[p] for row, p in zip(rows, positions, strict=True)])[None],
            position_ids=torch.cat(positions)[None],
            use_cache=False,
            tokenmill=context,
        ).logits[0]
        for r, part in enumerate(packed.split([len(p) for p in positions])):
            logits[r].append(part)
    return [torch.cat(parts) for parts in logits]


class _Groups(dict[int | None, GroupContext]):
    """Group contexts by window, made when a layer asks for one."""

    def __init__(
        self,
        slot_mapping: torch.Tensor,
        starts: np.ndarray,
        query_lens: np.ndarray,
        tables: np.ndarray,
        a: Architecture,
    ) -> None:
        super().__init__()
        self._slot_mapping = slot_mapping
        self._rows = (starts, query_lens, tables)
        self._group_size = a.num_heads // a.num_kv_heads

    def __missing__(self, window: int | None) -> GroupContext:
        plans = plan_tensors(*self._rows, block_size=_BLOCK_SIZE, group_size=self._group_size, window=window)
        self[window] = GroupContext(self._slot_mapping, plans)
        return self[window]
