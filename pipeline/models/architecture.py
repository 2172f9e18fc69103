"""What a model's configuration says about the engine: can it run, and what does its KV cache keep.

Decided from the configuration alone, before any weight is read. Knows configurations; refuses to
know weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# What the paged cache and the tile plans can express.
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "attention"}
_WAY_OUT = "engine=transformers may run it"


class UnsupportedModel(ValueError):
    """The engine cannot run this configuration; the message says why and what to do."""


@dataclass(frozen=True)
class Architecture:
    """Sizes the engine needs. max_position: longest row the model was made for."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int


def read_architecture(config: Any) -> Architecture:
    """Sizes of a transformers configuration; UnsupportedModel if the engine cannot run it."""
    _refuse_unsupported(config)
    heads = _first(config, "num_attention_heads", "n_head")
    hidden = _first(config, "hidden_size", "n_embd")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Architecture(
        num_layers=_first(config, "num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        vocab_size=config.vocab_size,
        max_position=_first(config, "max_position_embeddings", "n_positions"),
    )


def _refuse_unsupported(config: Any) -> None:
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"model.path: {kind} is an encoder-decoder; the engine runs decoders only")
    for part in ("vision_config", "audio_config", "text_config"):
        if getattr(config, part, None) is not None:
            raise UnsupportedModel(
                f"model.path: {kind} is multimodal ({part}); use a text-only checkpoint, or {_WAY_OUT}"
            )
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - _SUPPORTED_LAYERS)
    if foreign:
        raise UnsupportedModel(
            f"model.path: {kind} has layers of type {', '.join(foreign)}; the engine runs full and "
            f"sliding-window attention only; {_WAY_OUT}"
        )
    rope = rope_type(config)
    if rope in ("dynamic", "longrope"):
        raise UnsupportedModel(
            f"model.path: {kind} has {rope} RoPE, whose frequencies depend on the longest row of a batch: "
            f"rows would change with their neighbours; {_WAY_OUT}"
        )


def rope_type(config: Any) -> str:
    """The configuration's RoPE variant, `default` if it names none."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _first(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    raise UnsupportedModel(
        f"model.path: the configuration of {config.model_type} has no {names[0]}; {_WAY_OUT}"
    )
