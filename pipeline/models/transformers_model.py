"""A model as transformers itself runs it: for the backend that uses transformers' own engine.

What that engine would get wrong in silence, or only find out after the weights are read, is refused
from the configuration. Knows configurations and loading; refuses to know scheduling.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from transformers import ContinuousBatchingConfig

from pipeline.config import Attention, ModelConfig, TransformersEngineConfig
from pipeline.models.adapter import check_adapter
from pipeline.models.architecture import Architecture, UnsupportedModel, rope_range, rope_type
from pipeline.models.load import (
    InspectedModel,
    LoadedModel,
    read_config,
    read_generation_config,
    resolve_device,
    resolve_dtype,
    stop_ids,
)
from pipeline.models.load_errors import require_packages
from pipeline.models.quantized import check_quantization
from pipeline.models.revision import pin_revision
from pipeline.models.transformers_flash import assemble, can_assemble
from pipeline.models.weight_files import check_weight_files
from pipeline.models.weights import read_weights

_CACHED_LAYERS = {"full_attention", "sliding_attention"}
_FLASH = (Attention.flash_attention_2, Attention.flash_attention_3)
# Since the paged cache belongs to the call and not to the attention's name, `paged|` is eager's alone.
PAGES_BY_CALL = "auto_switch_to_flash" in {f.name for f in fields(ContinuousBatchingConfig)}


def inspect_for_transformers(config: ModelConfig, engine: TransformersEngineConfig) -> InspectedModel:
    """Read and check all but the weights.

    Raises UnsupportedModel for what transformers' continuous batching cannot run or gets wrong,
    ValueError for what cannot be read or used here.
    """
    config = pin_revision(config)
    hf_config = read_config(config)
    device = resolve_device(config.device)
    architecture = _sizes(hf_config, config.max_model_len)
    _check_layers(hf_config, engine.attention, device)
    _check_rope(hf_config, architecture.max_position)
    if device.type == "cpu":
        require_packages({"psutil": "psutil"}, "engine=transformers on a CPU", "psutil")
    check_quantization(config.path, hf_config, device)
    check_weight_files(config)
    check_adapter(config, hf_config)
    return InspectedModel(
        config=config,
        hf_config=hf_config,
        generation_config=read_generation_config(config),
        architecture=architecture,
    )


def load_for_transformers(
    config: ModelConfig,
    engine: TransformersEngineConfig,
    tokenizer: Any = None,
    inspected: InspectedModel | None = None,
) -> LoadedModel:
    """Inspect the model unless that was done, then read the weights. Raises as the inspection does."""
    inspected = inspected or inspect_for_transformers(config, engine)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, inspected.hf_config, device)
    return wrap_for_transformers(
        read_weights(inspected.config, inspected.hf_config, dtype, device),
        engine,
        tokenizer=tokenizer,
        generation_config=inspected.generation_config,
        max_model_len=inspected.max_model_len,
    )


def wrap_for_transformers(
    model: Any,
    engine: TransformersEngineConfig,
    *,
    tokenizer: Any = None,
    generation_config: Any = None,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Take a transformers model that is already in memory; its attention is named in place."""
    architecture = _sizes(model.config, max_model_len)
    parameter = next(model.parameters())
    if _assembles_flash(model, engine.attention, parameter.device):
        _set_assembled_flash(model, engine, architecture, parameter.device)
    else:
        _set_attention(model, engine.attention, parameter.device)
    vocab_size = architecture.vocab_size
    return LoadedModel(
        model=model,
        architecture=architecture,
        device=parameter.device,
        dtype=model.dtype,
        vocab_size=vocab_size if tokenizer is None else min(vocab_size, len(tokenizer)),
        max_model_len=architecture.max_position,
        eos_ids=stop_ids(generation_config or getattr(model, "generation_config", None), tokenizer),
        tokenizer=tokenizer,
    )


def _sizes(hf_config: Any, max_model_len: int | None) -> Architecture:
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"model.path: {hf_config.model_type} is an encoder-decoder; only decoders can be run"
        )
    text = hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not heads:
        raise UnsupportedModel(
            f"model.path: {hf_config.model_type} has no attention heads: transformers' continuous batching "
            "runs attention models only; use a transformer"
        )
    own = getattr(text, "max_position_embeddings", None)
    longest = max_model_len or own
    if longest is None:
        raise ValueError(
            f"model.path: {hf_config.model_type} does not say how long a row may be: set model.max_model_len"
        )
    if own is not None and max_model_len is not None and max_model_len > own:
        raise ValueError(
            f"model.max_model_len={max_model_len} is past the model's max_position_embeddings {own}: "
            "lower it or leave it null"
        )
    return Architecture(
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        max_position=longest,
    )


def _check_layers(hf_config: Any, attention: Attention, device: torch.device) -> None:
    kind, text = hf_config.model_type, hf_config.get_text_config()
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - _CACHED_LAYERS)
    if foreign:
        raise UnsupportedModel(
            f"model.path: {kind} has layers of type {', '.join(foreign)}; transformers' continuous batching "
            "has a cache for full and sliding-window attention only; use another model"
        )
    if attention in _FLASH and device.type == "cpu":
        raise ValueError(f"engine.attention={attention.value} needs a GPU: use engine.attention=auto")
    if getattr(text, "attn_logit_softcapping", None) and attention not in _FLASH:
        # Both paged eager and sdpa drop the softcap and say nothing.
        raise UnsupportedModel(
            f"model.path: {kind} caps its attention scores (attn_logit_softcapping), which transformers' "
            "continuous batching does with flash attention only; use engine=native, or on a GPU "
            "engine.attention=flash_attention_2"
        )


def _check_rope(hf_config: Any, longest: int) -> None:
    text = hf_config.get_text_config()
    static = rope_range(text)
    if static is not None and longest > static:
        raise UnsupportedModel(
            f"model.path: {hf_config.model_type} has {rope_type(text)} RoPE, whose frequencies change with "
            f"the longest row of a batch once that is past {static} tokens: rows would change with their "
            f"neighbours. Set model.max_model_len={static} or less"
        )


def _assembles_flash(model: Any, attention: Attention, device: torch.device) -> bool:
    """Whether FlashAttention-3 is wanted, and has to be put together from fa3-fwd."""
    if attention is Attention.auto and not getattr(model, "_supports_flash_attn", False):
        return False
    return attention in (Attention.auto, Attention.flash_attention_3) and can_assemble(device, model.dtype)


def _set_assembled_flash(
    model: Any, engine: TransformersEngineConfig, architecture: Architecture, device: torch.device
) -> None:
    # Steps are padded to a power of two.
    max_rows = 1 << (engine.max_num_seqs - 1).bit_length()
    assemble(architecture, max_rows=max_rows, page_size=engine.block_size, dtype=model.dtype, device=device)
    name = Attention.flash_attention_3.value
    name = name if PAGES_BY_CALL else f"paged|{name}"
    # set_attn_implementation would ask for the package flash-attn-3 by name.
    for config in {
        id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None
    }.values():
        config._attn_implementation_internal = name


def _set_attention(model: Any, attention: Attention, device: torch.device) -> None:
    """Name the attention as this version of transformers wants it, so that it looks for no other."""
    name = attention.value
    if attention is Attention.auto:
        if device.type != "cpu":
            return
        name = model.config._attn_implementation
    if name == "eager" or not (PAGES_BY_CALL or name.startswith(("flash", "paged|"))):
        name = f"paged|{name}"
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"engine.attention={attention.value} cannot be used: {error}; use engine.attention=auto"
        ) from error
