"""What a model's configuration says about the engine: can it run, and what does its KV cache keep.

Decided from the configuration alone, before any weight is read. Knows configurations; refuses to
know weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# What the paged cache and the tile plans can express.
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "attention"}
# Heads of transformers' classes that make no text.
_OTHER_TASKS = (
    "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMaskedLM",
    "ForMultipleChoice", "RewardModel",
)  # fmt: skip
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


def read_architecture(config: Any, max_model_len: int | None = None) -> Architecture:
    """Sizes of a transformers configuration; UnsupportedModel if the engine cannot run it.

    max_model_len: no row will be longer; None takes the configuration's own range. ValueError if
    that range is shorter.
    """
    _refuse_unsupported(config)
    _refuse_other_tasks(config)
    _refuse_unknown_rope(config)
    longest = _longest_row(config, max_model_len)
    heads = _first(config, "num_attention_heads", "n_head")
    hidden = _first(config, "hidden_size", "n_embd")
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise UnsupportedModel(
            f"model.path: config.json is wrong: num_attention_heads={heads} is no multiple of "
            f"num_key_value_heads={kv_heads}"
        )
    return Architecture(
        num_layers=_first(config, "num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        vocab_size=config.vocab_size,
        max_position=longest,
    )


def _refuse_unsupported(config: Any) -> None:
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"model.path: {kind} is an encoder-decoder; the engine runs decoders only: use "
            "a causal language model"
        )
    for part in ("vision_config", "audio_config", "text_config"):
        if getattr(config, part, None) is not None:
            raise UnsupportedModel(
                f"model.path: {kind} is multimodal ({part}); use a text-only checkpoint, or {_WAY_OUT}"
            )
    layer_types = getattr(config, "layer_types", None) or ()
    if "sliding_attention" in layer_types and not getattr(config, "sliding_window", None):
        raise UnsupportedModel(
            "model.path: config.json is wrong: layer_types has sliding_attention, and sliding_window is "
            "not set: set it, or write full_attention"
        )
    foreign = sorted(set(layer_types) - _SUPPORTED_LAYERS)
    if foreign:
        raise UnsupportedModel(
            f"model.path: {kind} has layers of type {', '.join(foreign)}; the engine runs full and "
            f"sliding-window attention only; {_WAY_OUT}"
        )


def _refuse_other_tasks(config: Any) -> None:
    """A classifier's weights have no head for text, and one tied to the embedding would not be missed."""
    names = list(getattr(config, "architectures", None) or ())
    if names and all(name.endswith(_OTHER_TASKS) for name in names):
        raise UnsupportedModel(
            f"model.path: {', '.join(names)} does not generate text: use a causal language model"
        )


def _refuse_unknown_rope(config: Any) -> None:
    kind = rope_type(config)
    if kind not in ROPE_INIT_FUNCTIONS and kind != "default":
        known = ", ".join(sorted({*ROPE_INIT_FUNCTIONS, "default"}))
        raise UnsupportedModel(
            f"model.path: config.json is wrong: transformers knows no rope_type={kind} here ({known})"
        )


def _longest_row(config: Any, max_model_len: int | None) -> int:
    own = _first(config, "max_position_embeddings", "n_positions")
    if max_model_len is not None and max_model_len > own:
        raise ValueError(
            f"model.max_model_len={max_model_len} is past the model's max_position_embeddings {own}: "
            "lower it or leave it null"
        )
    longest, static = max_model_len or own, rope_range(config)
    if static is not None and longest > static:
        raise UnsupportedModel(
            f"model.path: {config.model_type} has {rope_type(config)} RoPE, whose frequencies change with "
            f"the longest row of a batch once that is past {static} tokens: rows would change with their "
            f"neighbours. Set model.max_model_len={static} or less"
        )
    return longest


def rope_range(config: Any) -> int | None:
    """Row length up to which the RoPE's frequencies are the same for all rows; None if always."""
    if rope_type(config) not in ("dynamic", "longrope"):
        return None
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    original = parameters.get("original_max_position_embeddings")
    return (
        original
        or getattr(config, "original_max_position_embeddings", None)
        or config.max_position_embeddings
    )


def rope_type(config: Any) -> str:
    """The configuration's RoPE variant, `default` if it names none."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _first(config: Any, *names: str) -> int:
    for name in names:
        value = getattr(config, name, None)
        if value is None:
            continue
        if value < 1:
            raise UnsupportedModel(f"model.path: config.json is wrong: {name}={value} must be 1 or more")
        return value
    raise UnsupportedModel(
        f"model.path: the configuration of {config.model_type} has no {names[0]}; {_WAY_OUT}"
    )
