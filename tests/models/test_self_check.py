"""A doll of the model must give eager's logits: right ones pass, wrong ones are refused with the way out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fakes import FAMILIES, family_config
from transformers import Phi3Config
from transformers.models.llama import modeling_llama

from pipeline.models import architecture, self_check
from pipeline.models.architecture import UnsupportedModel
from pipeline.models.self_check import check_architecture

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 1e4,
}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}


def longrope_config() -> Any:
    """Phi-3's: other frequencies for all rows as soon as one of them is past 128 positions."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 128, "rope_theta": 1e4, **factors}
    return Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        pad_token_id=0,
        rope_parameters=rope,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_pass(family: str) -> None:
    check_architecture(family_config(family))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"num_key_value_heads": 1}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0}),
        # As large as real ones: the doll must stay a doll.
        (
            "llama",
            {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_variants_pass(family: str, changes: dict[str, Any]) -> None:
    check_architecture(family_config(family, **changes))


def break_mask(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Give Llama's own (eager) attention another mask; the engine's attention never sees it."""
    whole = modeling_llama.create_causal_mask

    def changed(*args: Any, **kwargs: Any) -> Any:
        mask = whole(*args, **kwargs)
        return change(mask) if isinstance(mask, torch.Tensor) else mask

    monkeypatch.setattr(modeling_llama, "create_causal_mask", changed)


def chunked(mask: torch.Tensor) -> torch.Tensor:
    """Llama 4's chunked attention, told by nothing in the configuration: chunks of 8 positions."""
    rows = torch.arange(mask.shape[-2])[:, None] // 8
    return mask.masked_fill(rows != torch.arange(mask.shape[-1]) // 8, torch.finfo(mask.dtype).min)


def prefix_visible(mask: torch.Tensor) -> torch.Tensor:
    """A prefix model: the first four positions see each other."""
    mask = mask.clone()
    mask[..., :4, :4] = 0
    return mask


@pytest.mark.parametrize("change", [chunked, prefix_visible])
def test_a_mask_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    break_mask(monkeypatch, change)
    with pytest.raises(UnsupportedModel) as caught:
        check_architecture(family_config("llama"))
    message = str(caught.value)
    assert "llama gives other logits" in message and "engine=transformers" in message


def test_an_unchanged_mask_passes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is the mask, and not the patching, that is refused above."""
    break_mask(monkeypatch, lambda mask: mask)
    check_architecture(family_config("llama"))


def test_dynamic_rope_is_refused_by_its_configuration() -> None:
    with pytest.raises(UnsupportedModel, match=r"dynamic RoPE.*model.max_model_len"):
        check_architecture(family_config("llama", rope_parameters=DYNAMIC))


def test_longrope_is_refused_by_the_doll_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it not known by name, its logits would give it away: a short row beside a long one."""
    for module in (architecture, self_check):
        monkeypatch.setattr(module, "rope_range", lambda config: None)
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        check_architecture(longrope_config())


def test_longrope_within_its_range_passes() -> None:
    with pytest.raises(UnsupportedModel, match="longrope"):
        check_architecture(longrope_config())
    check_architecture(longrope_config(), 128)


def test_dynamic_rope_within_its_range_passes() -> None:
    check_architecture(family_config("llama", rope_parameters=DYNAMIC), 128)


def test_a_scale_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    eager = modeling_llama.eager_attention_forward

    def doubled(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return eager(module, 2 * query, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled)
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        check_architecture(family_config("llama"))


def test_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference that is NaN is not small."""
    monkeypatch.setattr(self_check, "_largest_difference", lambda *args: float("nan"))
    with pytest.raises(UnsupportedModel, match="gives other logits"):
        check_architecture(family_config("llama"))


def test_a_model_that_cannot_even_run_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("cache_position")

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", broken)
    with pytest.raises(UnsupportedModel, match=r"does not run.*KeyError.*cache_pos.*engine=transformers"):
        check_architecture(family_config("llama"))


def test_the_check_leaves_configuration_and_random_numbers_alone() -> None:
    config = family_config("mistral", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    before, state = copy.deepcopy(config.to_dict()), torch.get_rng_state()
    implementation = config._attn_implementation
    check_architecture(config)
    assert config.to_dict() == before and config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), state)
