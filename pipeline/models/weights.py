"""Reads a model's weights, of whatever format, and refuses what is not exactly the model's.

Knows transformers' loading and what it tells of it; refuses to know the engine. A tensor that the
files lack is made up at random by transformers, one that the configuration does not speak of is
left out, and both go on: here they end it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pipeline.config import LoadFormat, ModelConfig
from pipeline.models.adapter import merge_adapter
from pipeline.models.gguf import gguf_weight_arguments
from pipeline.models.load_errors import explain_unreadable
from pipeline.models.quantized import quantization_of
from pipeline.models.stage import staged

_SHOWN = 3
# Buffers that older files carry and that are computed anew: RoPE's frequencies, causal masks.
_COMPUTED = re.compile(r"\.(inv_freq|masked_bias|position_ids|attn\.bias|attention\.bias)$")


def read_weights(config: ModelConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The model on its device, adapter merged, ready to compute. ValueError naming what is wrong."""
    if config.load_format is LoadFormat.dummy:
        return _random_model(config, hf_config, dtype, device).eval().requires_grad_(False)
    if not sys.stderr.isatty():
        # A bar is for terminals; a log would be left with its carriage returns.
        transformers_logging.disable_progress_bar()
    # Quantised layers are laid out for one device and may refuse to move.
    placed = quantization_of(hf_config) is not None and device.type != "cpu"
    model, found = _load(staged(config), hf_config, dtype, {"device_map": {"": device}} if placed else {})
    _refuse_incomplete(config.path, found)
    _refuse_left_out(config.path, hf_config, model, found["unexpected_keys"])
    model = model if placed else model.to(device)
    return merge_adapter(config, model).eval().requires_grad_(False)


def _random_model(config: ModelConfig, hf_config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """The same random weights each time on one kind of device, so that a resumed job has the same model.

    Made where they belong: a CPU would take minutes for what a GPU draws in a second.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code
        )


def _load(config: ModelConfig, hf_config: Any, dtype: torch.dtype, place: dict[str, Any]) -> tuple[Any, Any]:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            config.path,
            config=hf_config,
            revision=config.revision,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused by name
            **gguf_weight_arguments(config),
            **place,
        )
    except Exception as error:  # each format of weights has errors of its own
        reason = explain_unreadable(config.path, "config.json", error)
        raise ValueError(
            f"model.path={config.path}: the weights cannot be read: {type(error).__name__}: {reason}; "
            "fetch the model again"
        ) from error
    return loaded


def _refuse_incomplete(path: str, found: dict[str, Any]) -> None:
    """transformers fills what the files lack with random numbers, and goes on."""
    wrong = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    wrong += [
        f"{name} has shape {list(there)}, config.json asks for {list(asked)}"
        for name, there, asked in sorted(found["mismatched_keys"])
    ]
    if wrong:
        raise ValueError(
            f"model.path={path}: the weights do not belong to its config.json: {_first_of(wrong)}. "
            "Fetch the model again, both from one place"
        )


def _refuse_left_out(path: str, hf_config: Any, model: Any, unexpected: Iterable[str]) -> None:
    """Weights beside the model (a vision tower, a value head) may stay out; parts of it may not."""
    modules = {name for name, _ in model.named_modules()}
    text = hf_config.get_text_config()
    layers = text.num_hidden_layers
    # Layers that predict further tokens, for speculative decoding, stand behind the others.
    further = range(layers, layers + (getattr(text, "num_nextn_predict_layers", None) or 0))
    wrong = []
    for name in sorted(unexpected):
        owner = name.rpartition(".")[0]
        numbered = re.match(r"(.*\.layers|.*\.h)\.(\d+)\.", name)
        layer = int(numbered[2]) if numbered and numbered[1] in modules else None
        if _COMPUTED.search(name) or layer in further:
            continue
        if owner in modules or layer is not None:
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"model.path={path}: the weights hold parts of the model that its config.json leaves out, so it "
            f"would compute something else: {_first_of(wrong)}. Check num_hidden_layers, attention_bias and "
            "quantization_config, or fetch the model again"
        )


def _first_of(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return "; ".join(names[:_SHOWN]) + more
