"""LoRA adapters in peft's format, merged into the weights as the model is loaded.

Knows peft; an adapter is held against the model's configuration before any weight is read, so one
that was trained on another model is refused in a moment. Merged, it costs no step any time.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pipeline.config import ModelConfig
from pipeline.models.load_errors import one_line, require_packages

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# What peft calls the model that it wraps.
_WRAPPED = "base_model.model."
_SHOWN = 3


def check_adapter(config: ModelConfig, hf_config: Any) -> None:
    """Raises ValueError unless model.adapter fits the model tensor by tensor. Reads none of its weights."""
    if config.adapter is None:
        return
    require_packages({"peft": "peft"}, f"model.adapter={config.adapter}", "tokenmill[lora]")
    folder, about = _read(config.adapter)
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ValueError(
            f"{_named(config)} cannot be merged into quantised weights without rounding them again: use an "
            "unquantised model.path"
        )
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.trust_remote_code)
    tied = _tied_modules(base) if getattr(hf_config, "tie_word_embeddings", False) else []
    found = {name: list(tensor.shape) for name, tensor in _tensors(folder).items()}
    for module in tied:
        if any(name.startswith(f"{_WRAPPED}{module}.") for name in found):
            raise ValueError(
                f"{_named(config)} changes {module}, which the model uses twice (tie_word_embeddings): "
                "merged, it would change both. Merge it with peft into an untied copy of the model"
            )
    wrong = _differences(_expected(config, folder, base), found)
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"{_named(config)} was not made for model.path={config.path}"
            f"{_trained_on(about)}: {'; '.join(wrong[:_SHOWN])}{more}"
        )


def merge_adapter(config: ModelConfig, model: Any) -> Any:
    """The model with its weights changed by model.adapter; as it is without one."""
    if config.adapter is None:
        return model
    from peft import PeftModel

    try:
        wrapped = PeftModel.from_pretrained(model, str(_folder(config.adapter)))
        # safe: a NaN in the adapter stops here instead of in every row.
        return wrapped.merge_and_unload(safe_merge=True)
    except Exception as error:  # peft raises what the tensors happen to cause
        raise ValueError(f"{_named(config)} cannot be merged: {one_line(error)}") from error


def adapter_identity(config: ModelConfig) -> str | None:
    """A hash of the adapter, wherever it lies."""
    if config.adapter is None:
        return None
    folder, about = _read(config.adapter)
    # Where the base model lay is no fact of the adapter.
    about = {key: value for key, value in about.items() if key != "base_model_name_or_path"}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    with _weights(folder).open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()[:32]


def _read(adapter: str) -> tuple[Path, dict[str, Any]]:
    """The folder and its adapter_config.json."""
    folder = _folder(adapter)
    if not (folder / _CONFIG).is_file():
        what = f"has no {_CONFIG}" if folder.is_dir() else "is no folder"
        raise ValueError(
            f"model.adapter={adapter} {what}: give a local folder in peft's format (one on the hub comes "
            "with `hf download NAME --local-dir FOLDER`)"
        )
    try:
        about = dict(json.loads((folder / _CONFIG).read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"model.adapter={adapter}: {_CONFIG} is damaged: {one_line(error)}") from error
    _weights(folder)
    if about.get("peft_type") != "LORA":
        raise ValueError(
            f"model.adapter={adapter} is of type {about.get('peft_type')}: only LORA is merged; merge this "
            "one with peft and give the result as model.path"
        )
    return folder, about


def _folder(adapter: str) -> Path:
    return Path(os.path.expanduser(adapter))


def _weights(folder: Path) -> Path:
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise ValueError(f"model.adapter={folder} has no {_WEIGHTS[0]}: fetch the adapter again")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from peft.utils import load_peft_weights

    try:
        return dict(load_peft_weights(str(folder), device="cpu"))
    except Exception as error:  # each format has errors of its own
        raise ValueError(
            f"model.adapter={folder}: {_weights(folder).name} is damaged: {one_line(error)}"
        ) from error


def _tied_modules(base: Any) -> list[str]:
    """Names of the embedding and of the head."""
    both = (base.get_input_embeddings(), base.get_output_embeddings())
    return [name for name, module in base.named_modules() if any(module is one for one in both)]


def _expected(config: ModelConfig, folder: Path, base: Any) -> dict[str, list[int]]:
    """Shapes of all the tensors that peft asks for on this model."""
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    settings: Any = PeftConfig.from_pretrained(str(folder))
    # How the tensors began does not matter here, and some ways of beginning compute with the weights.
    settings.init_lora_weights = False
    try:
        wrapped = PeftModel(base, settings)
    except Exception as error:  # no module has the adapter's names, or another kind of module has
        raise ValueError(
            f"{_named(config)} was not made for model.path={config.path}: {one_line(error)}"
        ) from error
    state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    return {name: list(tensor.shape) for name, tensor in state.items()}


def _differences(expected: dict[str, list[int]], found: dict[str, list[int]]) -> list[str]:
    lines = []
    for name in sorted({*expected, *found}):
        short = name.removeprefix(_WRAPPED)
        if name not in found:
            lines.append(f"it has nothing for {short}")
        elif name not in expected:
            lines.append(f"its {short} has no place in the model")
        elif found[name] != expected[name]:
            lines.append(f"its {short} has shape {found[name]}, the model asks for {expected[name]}")
    return lines


def _named(config: ModelConfig) -> str:
    return f"model.adapter={config.adapter}"


def _trained_on(about: dict[str, Any]) -> str:
    base = about.get("base_model_name_or_path")
    return f" (but for {base})" if base else ""
