"""Loads a model for the engine: configuration first, proof second, weights last.

Knows transformers' loading; refuses to know scheduling. Errors name the key and the remedy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from pipeline.config import Device, Dtype, ModelConfig
from pipeline.models.adapter import check_adapter
from pipeline.models.architecture import Architecture, read_architecture
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.gguf import check_gguf, gguf_arguments, mend_gguf_tokenizer
from pipeline.models.load_errors import explain_unreadable, one_line, quiet_retries
from pipeline.models.quantized import check_quantization, quantization_of
from pipeline.models.revision import pin_revision
from pipeline.models.self_check import check_architecture, check_step_equals_eager
from pipeline.models.weight_files import check_weight_files
from pipeline.models.weights import read_weights


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
    if (Path(os.path.expanduser(config.path)) / "adapter_config.json").exists():
        # transformers would quietly load the model that the adapter names.
        raise ValueError(
            f"model.path={config.path} is an adapter: give it as model.adapter, and the model that it was "
            "trained on as model.path"
        )
    check_gguf(config)
    try:
        with quiet_retries():
            return AutoConfig.from_pretrained(
                config.path,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                **gguf_arguments(config),
            )
    except Exception as error:  # transformers raises what the broken file happens to cause
        raise ValueError(
            f"model.path={config.path} cannot be read as a model: "
            f"{explain_unreadable(config.path, config.gguf_file or 'config.json', error)}"
        ) from error


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of model.tokenizer or model.path; ValueError naming the key if there is none."""
    path = config.tokenizer or config.path
    key = "model.tokenizer" if config.tokenizer else "model.path"
    # The revision and the GGUF file belong to the model's folder, not to another one.
    own: dict[str, Any] = {} if config.tokenizer else {"revision": config.revision, **gguf_arguments(config)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code, **own)
    except Exception as error:  # transformers raises what the broken file happens to cause
        raise ValueError(
            f"{key}={path} has no usable tokenizer: "
            f"{explain_unreadable(path, config.gguf_file or 'tokenizer.json', error, key)}; "
            "set model.tokenizer to a folder that has one"
        ) from error
    return mend_gguf_tokenizer(config, tokenizer) if "gguf_file" in own else tokenizer


def read_generation_config(config: ModelConfig) -> GenerationConfig | None:
    """The model's own sampling defaults and stop ids; None if it brings none."""
    try:
        return GenerationConfig.from_pretrained(config.path, revision=config.revision or "main")
    except OSError as error:
        # transformers says of a damaged file, too, that there is none.
        file = Path(os.path.expanduser(config.path)) / "generation_config.json"
        if file.exists():
            raise ValueError(
                f"model.path={config.path}: {file} cannot be read, and it says where rows stop: "
                f"restore it, or remove it to go without ({one_line(error)})"
            ) from error
        return None


@dataclass(frozen=True)
class InspectedModel:
    """What is known of a model before its weights are read: it can run, and with which sizes.

    config: as given, its revision pinned to the commit that was found, so that all else is read from it.
    """

    config: ModelConfig
    hf_config: Any
    generation_config: GenerationConfig | None
    architecture: Architecture

    @property
    def max_model_len(self) -> int:
        return self.architecture.max_position


def inspect_model(config: ModelConfig) -> InspectedModel:
    """Read and check all but the weights.

    Raises UnsupportedModel for what the engine cannot run, ValueError for what cannot be read.
    """
    config = pin_revision(config)
    hf_config = read_config(config)
    architecture = read_architecture(hf_config, config.max_model_len)
    device = resolve_device(config.device)
    check_quantization(config.path, hf_config, device)
    check_architecture(hf_config, config.max_model_len, config.trust_remote_code)
    check_weight_files(config)
    check_adapter(config, hf_config)
    return InspectedModel(config, hf_config, read_generation_config(config), architecture)


def load_model(
    config: ModelConfig, tokenizer: Any = None, inspected: InspectedModel | None = None
) -> LoadedModel:
    """Inspect the model unless that was done, then read the weights. Raises as `inspect_model`."""
    inspected = inspected or inspect_model(config)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, inspected.hf_config, device)
    loaded = wrap_model(
        read_weights(inspected.config, inspected.hf_config, dtype, device),
        tokenizer=tokenizer,
        generation_config=inspected.generation_config,
        max_model_len=inspected.max_model_len,
    )
    if quantization_of(inspected.hf_config) is not None:
        check_step_equals_eager(loaded.model, loaded.architecture)
    return loaded


def wrap_model(
    model: Any,
    *,
    tokenizer: Any = None,
    generation_config: Any = None,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Take a transformers model that is already in memory; its attention is replaced in place."""
    architecture = read_architecture(model.config, max_model_len)
    model.set_attn_implementation(ATTENTION_NAME)
    generation_config = generation_config or getattr(model, "generation_config", None)
    vocab_size = architecture.vocab_size
    if tokenizer is not None:
        vocab_size = min(vocab_size, len(tokenizer))
    return LoadedModel(
        model=model,
        architecture=architecture,
        device=next(model.parameters()).device,
        # Of the first parameter that is a float: quantised ones are not.
        dtype=model.dtype,
        vocab_size=vocab_size,
        max_model_len=architecture.max_position,
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
    on_gpu = device is Device.cuda or (device is Device.auto and torch.cuda.is_available())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def resolve_dtype(dtype: Dtype, hf_config: Any, device: torch.device) -> torch.dtype:
    """`auto` is float32 on the CPU (half types are slow and not reproducible there), else the model's own."""
    if dtype is not Dtype.auto:
        return getattr(torch, dtype.value)
    if device.type == "cpu":
        return torch.float32
    return getattr(hf_config, "dtype", None) or torch.bfloat16
