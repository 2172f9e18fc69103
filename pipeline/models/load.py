"""Loads a model for the engine: configuration first, proof second, weights last.

Knows transformers' loading; refuses to know scheduling. Errors name the key and the remedy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pipeline.config import Device, Dtype, LoadFormat, ModelConfig
from pipeline.models.architecture import Architecture, read_architecture
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.self_check import check_architecture


@dataclass(frozen=True)
class LoadedModel:
    """A model that runs through the engine's attention, and what the engine must know of it.

    vocab_size: ids that may be sampled. max_model_len: longest row, prompt and completion.
    eos_ids: ids that end a row, of the generation configuration and the tokenizer together.
    """

    model: Any
    architecture: Architecture
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    tokenizer: Any = None


def read_config(config: ModelConfig) -> Any:
    """The transformers configuration of model.path; ValueError naming it if there is none."""
    try:
        return AutoConfig.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path={config.path} cannot be read as a model: "
            f"{_explain_missing(config.path, 'config.json')}{error}"
        ) from error


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of model.tokenizer or model.path; ValueError naming the key if there is none."""
    path = config.tokenizer or config.path
    key = "model.tokenizer" if config.tokenizer else "model.path"
    # The revision names a state of the model's repository, not of another one.
    revision = None if config.tokenizer else config.revision
    try:
        return AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:  # transformers raises what the broken file happens to cause
        raise ValueError(
            f"{key}={path} has no usable tokenizer: {_explain_missing(path, 'tokenizer.json')}"
            f"{type(error).__name__}: {error}; set model.tokenizer to a folder that has one"
        ) from error


def read_generation_config(config: ModelConfig) -> GenerationConfig | None:
    """The model's own sampling defaults and stop ids; None if it brings none."""
    try:
        return GenerationConfig.from_pretrained(config.path, revision=config.revision or "main")
    except OSError:
        return None


@dataclass(frozen=True)
class InspectedModel:
    """What is known of a model before its weights are read: it can run, and how long its rows may be."""

    hf_config: Any
    generation_config: GenerationConfig | None
    architecture: Architecture
    max_model_len: int


def inspect_model(config: ModelConfig) -> InspectedModel:
    """Read and check all but the weights.

    Raises UnsupportedModel for what the engine cannot run, ValueError for what cannot be read.
    """
    hf_config = read_config(config)
    architecture = read_architecture(hf_config)
    check_architecture(hf_config, config.trust_remote_code)
    resolve_device(config.device)
    return InspectedModel(
        hf_config, read_generation_config(config), architecture, _max_model_len(config, architecture)
    )


def load_model(
    config: ModelConfig, tokenizer: Any = None, inspected: InspectedModel | None = None
) -> LoadedModel:
    """Inspect the model unless that was done, then read the weights. Raises as `inspect_model`."""
    inspected = inspected or inspect_model(config)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, inspected.hf_config, device)
    model = _read_weights(config, inspected.hf_config, dtype).to(device).eval().requires_grad_(False)
    return wrap_model(
        model,
        tokenizer=tokenizer,
        generation_config=inspected.generation_config,
        max_model_len=inspected.max_model_len,
    )


def wrap_model(
    model: Any,
    *,
    tokenizer: Any = None,
    generation_config: Any = None,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Take a transformers model that is already in memory; its attention is replaced in place."""
    architecture = read_architecture(model.config)
    model.set_attn_implementation(ATTENTION_NAME)
    generation_config = generation_config or getattr(model, "generation_config", None)
    vocab_size = architecture.vocab_size
    if tokenizer is not None:
        vocab_size = min(vocab_size, len(tokenizer))
    return LoadedModel(
        model=model,
        architecture=architecture,
        device=next(model.parameters()).device,
        dtype=next(model.parameters()).dtype,
        vocab_size=vocab_size,
        max_model_len=max_model_len or architecture.max_position,
        eos_ids=stop_ids(generation_config, tokenizer),
        tokenizer=tokenizer,
    )


def stop_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a row: the generation configuration's (often several) and the tokenizer's."""
    found: set[int] = set()
    for value in (getattr(generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return tuple(sorted(found))


def resolve_device(device: Device) -> torch.device:
    if device is Device.cuda and not torch.cuda.is_available():
        raise ValueError("model.device=cuda, but torch sees no GPU here: use model.device=auto or cpu")
    # The GPU path is not built yet; `auto` must not pick what cannot run.
    return torch.device("cuda" if device is Device.cuda else "cpu")


def resolve_dtype(dtype: Dtype, hf_config: Any, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU (half types are slow and not reproducible there), else the model's own."""
    if dtype is not Dtype.auto:
        return getattr(torch, dtype.value)
    if device.type == "cpu":
        return torch.float32
    return getattr(hf_config, "dtype", None) or torch.bfloat16


def _read_weights(config: ModelConfig, hf_config: Any, dtype: torch.dtype) -> Any:
    if config.load_format is LoadFormat.dummy:
        return AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code
        )
    try:
        return AutoModelForCausalLM.from_pretrained(
            config.path,
            config=hf_config,
            revision=config.revision,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"model.path={config.path}: the weights cannot be read: {error}") from error


def _max_model_len(config: ModelConfig, architecture: Architecture) -> int:
    if config.max_model_len is None:
        return architecture.max_position
    if config.max_model_len > architecture.max_position:
        raise ValueError(
            f"model.max_model_len={config.max_model_len} is past the model's max_position_embeddings "
            f"{architecture.max_position}: lower it or leave it null"
        )
    return config.max_model_len


def _explain_missing(path: str, name: str) -> str:
    """A first sentence for the commonest mistakes with local paths."""
    folder = Path(os.path.expanduser(path))
    if folder.is_dir() and not (folder / name).exists():
        return f"the folder has no {name}. "
    if not folder.exists() and path.startswith((".", "/", "~")):
        return "there is no such folder. "
    return ""
