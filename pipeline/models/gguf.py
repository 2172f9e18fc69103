"""GGUF files: weights, configuration and tokenizer in one, read through transformers.

Knows what transformers needs to open one, and where the tokenizer it rebuilds would cut text
otherwise than the model learned; refuses to know tensors.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from tokenizers import pre_tokenizers
from transformers.utils import cached_file

from pipeline.config import ModelConfig
from pipeline.models.load_errors import explain_unreadable, require_packages

_PACKAGES = {"gguf": "gguf", "accelerate": "accelerate"}
# Byte-level vocabularies whose text is cut as GPT-2's, which is what transformers falls back to.
_CUT_AS_GPT2 = {"gpt-2", "gpt2"}
# Those that split off every digit before that, which transformers leaves out (shown by its ids of numbers).
_CUT_BY_DIGITS = {"smollm"}


def gguf_arguments(config: ModelConfig) -> dict[str, Any]:
    """Keywords of from_pretrained; none unless the model is a GGUF file."""
    return {"gguf_file": config.gguf_file} if config.gguf_file else {}


def gguf_weight_arguments(config: ModelConfig) -> dict[str, Any]:
    """The same for the weights, which are to be unpacked even where kernels could use them packed."""
    kind = getattr(transformers, "GgufConfig", None)
    packing = {"quantization_config": kind(dequantize=True)} if config.gguf_file and kind else {}
    return {**gguf_arguments(config), **packing}


def require_gguf(config: ModelConfig) -> None:
    """Raises ValueError if the model is a GGUF file and a package to open it is missing."""
    if config.gguf_file is not None:
        require_packages(_PACKAGES, f"model.gguf_file={config.gguf_file}", "tokenmill[gguf]")


def check_gguf(config: ModelConfig) -> None:
    """Raises ValueError if the file is none, too. Nothing to do for other models."""
    if config.gguf_file is None:
        return
    require_gguf(config)
    with _file(config).open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"model.path={config.path}: {config.gguf_file} is no GGUF file")


def mend_gguf_tokenizer(config: ModelConfig, tokenizer: Any) -> Any:
    """Cut text before the byte pairs as the file's vocabulary learned it.

    Raises ValueError, asking for model.tokenizer, where it is not known how.
    """
    rebuilt = rules_of_transformers()
    if rebuilt is None:
        raise ValueError(
            f"model.gguf_file={config.gguf_file}: transformers {transformers.__version__} makes up its "
            "tokenizer by the model's family and not by the file: set model.tokenizer to the original model "
            "(its folder, or its name on the hub), or install a newer transformers"
        )
    model, cut = _tokenizer_kind(_file(config))
    # Sentencepiece vocabularies are not cut at all.
    if model != "gpt2" or cut in _CUT_AS_GPT2 or cut in rebuilt:
        return tokenizer
    if cut not in _CUT_BY_DIGITS:
        raise ValueError(
            f"model.gguf_file={config.gguf_file}: its tokenizer cuts text by the rule `{cut}`, which "
            "transformers cannot rebuild from the file, so prompts would become other ids: set "
            "model.tokenizer to the original model (its folder, or its name on the hub)"
        )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def _file(config: ModelConfig) -> Path:
    """The file on this machine, fetched from the hub if need be."""
    assert config.gguf_file is not None
    try:
        found = cached_file(os.path.expanduser(config.path), config.gguf_file, revision=config.revision)
    except OSError as error:
        reason = explain_unreadable(config.path, config.gguf_file, error)
        raise ValueError(f"model.path={config.path}, model.gguf_file={config.gguf_file}: {reason}") from error
    assert found is not None
    return Path(found)


@cache
def _tokenizer_kind(file: Path) -> tuple[str, str]:
    """tokenizer.ggml.model and tokenizer.ggml.pre."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    model, cut = (fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    return (model.contents() if model else "", cut.contents() if cut else "default")


def rules_of_transformers() -> set[str] | None:
    """Names of the rules that transformers applies; None for versions that look at none."""
    try:
        module = importlib.import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")
    except ImportError:
        return None
    rules = getattr(module, "GGUF_PRE_TOKENIZER_SPLITS", None)
    return None if rules is None else set(rules)
