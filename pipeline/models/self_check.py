"""Proof before the weights are read: a doll of the model must give eager's logits.

A doll is the same architecture with small sizes and random weights. Two rows run packed through
the engine's attention, one of them past the sliding window and past the RoPE's original range,
and each alone through transformers' eager attention. Whatever a configuration hides (a mask of
its own, chunked attention, frequencies that depend on the batch), it shows here.

Knows configurations and random weights; refuses to know real ones.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pipeline.models.architecture import Architecture, UnsupportedModel, read_architecture
from pipeline.models.attention import ATTENTION_NAME, AttentionContext
from pipeline.models.cpu_attention import plan_tiles

_ROW_LENGTHS = (7, 53)
_ORIGINAL_RANGE = 24
_WINDOW = 16
_BLOCK_SIZE = 16
_VOCABULARY = 96
# Wrong masks and frequencies were off by 0.5 and more, right ones by 2e-5 and less (float32).
_TOLERANCE = 1e-3


def check_architecture(config: Any, trust_remote_code: bool = False) -> None:
    """Raise UnsupportedModel, naming the way out, unless a doll of the model equals eager."""
    try:
        difference = _largest_difference(_doll_config(config), trust_remote_code)
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
            f"transformers' eager one (a small random model differs by {difference:.2g}): it would generate "
            "wrong text; engine=transformers may run it"
        )


def _doll_config(config: Any) -> Any:
    doll = copy.deepcopy(config)
    a = read_architecture(config)
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
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if hasattr(doll, name):
            setattr(doll, name, None)
    if getattr(doll, "layer_types", None):
        doll.layer_types = doll.layer_types[: doll.num_hidden_layers]
    _shrink_rope(doll)
    return doll


def _num_layers(config: Any) -> int:
    """Enough layers to meet every type there is."""
    types = list(getattr(config, "layer_types", None) or ())
    return (
        max([2] + [types.index(kind) + 1 for kind in set(types)])
        if types
        else min(2, config.num_hidden_layers)
    )


def _shrink_rope(doll: Any) -> None:
    """Scale the RoPE's range down, so that a short row already lies past it."""
    parameters = getattr(doll, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings")
    if original:
        doll.max_position_embeddings = max(
            _ORIGINAL_RANGE * doll.max_position_embeddings // original, max(_ROW_LENGTHS) + 1
        )
        parameters["original_max_position_embeddings"] = _ORIGINAL_RANGE
        if getattr(doll, "original_max_position_embeddings", None):
            doll.original_max_position_embeddings = _ORIGINAL_RANGE


def _largest_difference(config: Any, trust_remote_code: bool) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32, trust_remote_code=trust_remote_code
        ).eval()
    ids = [torch.arange(n) * 7 % _VOCABULARY for n in _ROW_LENGTHS]
    with torch.no_grad():
        expected = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in ids])
        model.set_attn_implementation(ATTENTION_NAME)
        got = model(
            input_ids=torch.cat(ids)[None],
            position_ids=torch.cat([torch.arange(n) for n in _ROW_LENGTHS])[None],
            use_cache=False,
            tokenmill=_packed_context(read_architecture(config), model),
        ).logits[0]
    return float((got - expected).abs().max())


def _packed_context(a: Architecture, model: Any) -> AttentionContext:
    """Both rows at once, each from its first token on, on blocks of its own."""
    query_lens = np.array(_ROW_LENGTHS, np.int32)
    starts = np.zeros_like(query_lens)
    blocks = -(-query_lens // _BLOCK_SIZE)
    tables = np.zeros((len(query_lens), blocks.max()), np.int32)
    next_block = 1
    for row, count in enumerate(blocks):
        tables[row, :count] = np.arange(next_block, next_block + count)
        next_block += count
    slots = [tables[r][np.arange(n) // _BLOCK_SIZE] * _BLOCK_SIZE + np.arange(n) % _BLOCK_SIZE
             for r, n in enumerate(_ROW_LENGTHS)]  # fmt: skip
    size = (int(next_block), a.num_kv_heads, _BLOCK_SIZE, a.head_dim)
    return AttentionContext(
        keys=[torch.zeros(size) for _ in range(a.num_layers)],
        values=[torch.zeros(size) for _ in range(a.num_layers)],
        slot_mapping=torch.from_numpy(np.concatenate(slots).astype(np.int64)),
        plans={
            window: [
                tensor
                for plan in plan_tiles(
                    starts,
                    query_lens,
                    tables,
                    block_size=_BLOCK_SIZE,
                    group_size=a.num_heads // a.num_kv_heads,
                    window=window,
                )
                for tensor in plan.tensors()
            ]
            for window in (None, _WINDOW)
        },
    )
