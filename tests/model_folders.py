"""Model folders on disk for tests of loading: small random models, and slight changes to them.

Knows how to write and bend a folder, and how the engine's greedy text compares with transformers'.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fakes import (
    by_key,
    family_config,
    make_engine,
    mixed_prompts,
    random_model,
    reference_generate,
    request,
    shipped_tokenizer,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pipeline.config import ModelConfig
from pipeline.models.load import LoadedModel, inspect_model, load_model, load_tokenizer
from pipeline.request import RowKey

NUM_TOKENS = len(shipped_tokenizer())
Tensors = dict[str, torch.Tensor]


def save_model(folder: Path, family: str = "llama", shards: str = "5GB", **changes: Any) -> Path:
    """A random model of the family and the shipped tokenizer, whose size it has."""
    sizes = {"vocab_size": NUM_TOKENS, "eos_token_id": 1, **changes}
    random_model(family_config(family, **sizes)).save_pretrained(folder, max_shard_size=shards)
    shipped_tokenizer().save_pretrained(folder)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys; `...` takes one away."""
    content = {**json.loads(file.read_text()), **changes} if file.exists() else changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def edit_config(folder: Path, **changes: Any) -> Path:
    edit_json(folder / "config.json", **changes)
    return folder


def edit_weights(folder: Path, change: Callable[[Tensors], object]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def load(path: Path | str, **model: Any) -> LoadedModel:
    """As a job does it: configuration and proof, tokenizer, weights."""
    config = ModelConfig(path=str(path), **model)
    inspected = inspect_model(config)
    return load_model(config, load_tokenizer(config), inspected)


def reference(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, **{"dtype": torch.float32, "attn_implementation": "eager", **options}
    ).eval()


def greedy(loaded: LoadedModel, max_tokens: int = 12, **engine: Any) -> list[np.ndarray]:
    """Completions of a few packed prompts, by the engine."""
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 8, **engine}
    requests = [request(i, ids, max_tokens=max_tokens) for i, ids in enumerate(prompts())]
    found = by_key(make_engine(loaded, **settings).generate(requests))
    return [found[RowKey(0, i), 0].token_ids for i in range(len(requests))]


def expected_greedy(model: Any, eos: tuple[int, ...] = (1,), max_tokens: int = 12) -> list[np.ndarray]:
    """The same by transformers' generate, one at a time."""
    return [reference_generate(model, ids, max_tokens, eos) for ids in prompts()]


def prompts() -> list[np.ndarray]:
    return mixed_prompts(6)


def same(got: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(g, e) for g, e in zip(got, expected, strict=True))
