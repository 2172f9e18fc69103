"""What a configuration alone says: sizes, and whether the engine can run it."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FAMILIES, family_config
from transformers import AutoConfig, GPT2Config, LlamaConfig, T5Config

from pipeline.models.architecture import Architecture, UnsupportedModel, read_architecture, rope_range

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 10_000.0,
}


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads"), [("llama", 4, 2), ("qwen2", 6, 2), ("qwen3", 8, 1), ("mistral", 4, 4)]
)
def test_sizes_of_the_families(family: str, heads: int, kv_heads: int) -> None:
    assert read_architecture(family_config(family)) == Architecture(2, heads, kv_heads, 16, 128, 512)


def test_sizes_that_a_configuration_leaves_out_follow_from_the_others() -> None:
    plain = read_architecture(LlamaConfig(hidden_size=96, num_attention_heads=6))
    assert (plain.num_kv_heads, plain.head_dim) == (6, 16)
    old_names = read_architecture(GPT2Config(n_layer=3, n_head=2, n_embd=32, n_positions=77))
    assert (old_names.num_layers, old_names.num_heads, old_names.head_dim) == (3, 2, 16)
    assert old_names.max_position == 77


@pytest.mark.parametrize("family", FAMILIES)
def test_max_model_len_shortens_and_never_lengthens(family: str) -> None:
    assert read_architecture(family_config(family), 100).max_position == 100
    with pytest.raises(ValueError, match=r"model\.max_model_len=513 .*max_position_embeddings 512.*lower it"):
        read_architecture(family_config(family), 513)


def refused(config: Any, *words: str, max_model_len: int | None = None) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_architecture(config, max_model_len)
    for word in ("model.path", config.model_type, *words):
        assert word in str(caught.value)


def test_what_cannot_run_is_refused_by_name() -> None:
    refused(T5Config(), "encoder-decoder")
    mixed = family_config("qwen3")
    mixed.layer_types = ["full_attention", "linear_attention"]
    refused(mixed, "linear_attention", "engine=transformers")
    mixed.layer_types = ["chunked_attention", "full_attention"]
    refused(mixed, "chunked_attention", "engine=transformers")
    seeing = family_config("llama")
    seeing.vision_config = {"hidden_size": 4}
    refused(seeing, "multimodal", "vision_config", "engine=transformers")


def test_a_configuration_without_sizes_is_refused_by_what_it_lacks() -> None:
    class Bare:
        model_type = "bare"
        vocab_size = 5

    refused(Bare(), "engine=transformers")


def test_dynamic_rope_is_refused_only_where_it_changes_with_the_batch() -> None:
    """transformers computes new frequencies once a batch's longest row is past the model's range."""
    within = family_config("llama", rope_parameters=DYNAMIC)
    assert rope_range(within) == 512
    assert read_architecture(within).max_position == 512
    original = {**DYNAMIC, "original_max_position_embeddings": 128}
    refused(family_config("llama", rope_parameters=original), "dynamic", "model.max_model_len")


def test_longrope_is_refused_past_its_original_range() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128, "rope_theta": 1e4, **factors}
    config = AutoConfig.for_model(
        "phi3",
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        pad_token_id=0,
        rope_parameters=rope,
    )
    refused(config, "longrope", "model.max_model_len=128")
    assert read_architecture(config, 128).max_position == 128


@pytest.mark.parametrize("rope", [None, {"rope_type": "default", "rope_theta": 1e4}, LLAMA3])
def test_static_rope_is_accepted_over_the_whole_range(rope: dict[str, Any] | None) -> None:
    config = family_config("llama", **({"rope_parameters": rope} if rope else {}))
    assert rope_range(config) is None and read_architecture(config).max_position == 512
