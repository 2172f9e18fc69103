"""LoRA adapters: merged at load, equal to peft's own model, refused where they do not fit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import (
    NUM_TOKENS,
    edit_config,
    edit_json,
    expected_greedy,
    greedy,
    load,
    reference,
    same,
    save_model,
)

from pipeline.config import ModelConfig
from pipeline.models.adapter import adapter_identity
from pipeline.models.load import inspect_model

peft = pytest.importorskip("peft", reason="needs the extra lora")


def save_adapter(folder: Path, base: Path, **settings: Any) -> Path:
    """A random adapter, strong enough to change what is said."""
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "up_proj"], **settings})
    model = peft.get_peft_model(reference(base), config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.data += 0.5 * torch.randn_like(parameter).abs()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True}, {"use_dora": True}, {"target_modules": "all-linear"}]
)
def test_equals_pefts_own_model(tmp_path: Path, base: Path, settings: dict[str, Any]) -> None:
    adapter = save_adapter(tmp_path, base, **settings)
    loaded = load(base, adapter=str(adapter))
    unmerged = peft.PeftModel.from_pretrained(reference(base), adapter).eval()
    # Before wrapping, to compare logits: merged weights through transformers itself.
    merged = reference(base)
    merged.load_state_dict(loaded.model.state_dict())
    ids = torch.arange(40)[None] * 7 % NUM_TOKENS
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, unmerged(ids).logits, rtol=1e-4, atol=1e-4)
    assert same(greedy(loaded), expected_greedy(unmerged))
    assert not same(greedy(loaded), expected_greedy(reference(base)))
    assert not any("lora" in name for name, _ in loaded.model.named_modules())


def refusal(base: Path, adapter: Path) -> str:
    with pytest.raises(ValueError) as caught:
        inspect_model(ModelConfig(path=str(base), adapter=str(adapter)))
    said = str(caught.value)
    assert said.startswith(f"model.adapter={adapter}") and "\n" not in said
    return said


def test_one_of_a_wider_model_is_refused_before_weights_are_read(tmp_path: Path, base: Path) -> None:
    wider = save_model(tmp_path / "wider", hidden_size=96, head_dim=24)
    adapter = save_adapter(tmp_path / "adapter", wider)
    (base / "model.safetensors").rename(tmp_path / "aside")
    try:
        with pytest.raises(ValueError, match="no weights"):
            inspect_model(ModelConfig(path=str(base)))
        (base / "model.safetensors").write_bytes((tmp_path / "aside").read_bytes())
        said = refusal(base, adapter)
    finally:
        (tmp_path / "aside").replace(base / "model.safetensors")
    assert f"was not made for model.path={base} (but for {wider})" in said
    assert "has shape [4, 96], the model asks for [4, 64]" in said


def test_one_of_a_deeper_model_is_refused(tmp_path: Path, base: Path) -> None:
    deeper = save_model(tmp_path / "deeper", num_hidden_layers=3)
    said = refusal(base, save_adapter(tmp_path / "adapter", deeper))
    assert "its model.layers.2." in said and "has no place in the model" in said


def test_one_of_a_shallower_model_is_refused(tmp_path: Path, base: Path) -> None:
    shallower = save_model(tmp_path / "shallower", num_hidden_layers=1)
    said = refusal(base, save_adapter(tmp_path / "adapter", shallower))
    assert "it has nothing for model.layers.1." in said


def test_one_of_another_family_is_refused(tmp_path: Path, base: Path) -> None:
    adapter = save_adapter(tmp_path, base)
    edit_json(adapter / "adapter_config.json", target_modules=["c_attn"])
    assert "c_attn" in refusal(base, adapter)


def test_tied_weights_are_not_changed_twice(tmp_path: Path) -> None:
    tied = save_model(tmp_path / "tied", "qwen3")
    adapter = save_adapter(tmp_path / "adapter", tied, target_modules=["q_proj", "embed_tokens"])
    assert "changes model.embed_tokens, which the model uses twice" in refusal(tied, adapter)


def test_quantised_weights_are_not_rounded_again(tmp_path: Path, base: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", base)
    quantised = edit_config(save_model(tmp_path / "fp8"), quantization_config={"quant_method": "fp8"})
    pytest.importorskip("accelerate", reason="transformers' fp8 needs it")
    assert "cannot be merged into quantised weights" in refusal(quantised, adapter)


def test_other_kinds_and_damaged_folders_are_refused(tmp_path: Path, base: Path) -> None:
    assert "is no folder" in refusal(base, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no adapter_config.json" in refusal(base, tmp_path / "empty")
    adapter = save_adapter(tmp_path / "adapter", base)
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    assert "adapter_model.safetensors is damaged" in refusal(base, adapter)
    weights.unlink()
    assert "has no adapter_model.safetensors" in refusal(base, adapter)
    weights.write_bytes(whole)
    edit_json(adapter / "adapter_config.json", peft_type="IA3")
    assert "is of type IA3" in refusal(base, adapter)


def test_a_missing_package_is_named_with_its_command(tmp_path: Path, base: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("pipeline.models.load_errors.find_spec", lambda name: None)
    assert re.search(r"needs peft: pip install 'tokenmill\[lora\]'$", refusal(base, tmp_path))


def test_the_identity_is_of_the_adapters_content(tmp_path: Path, base: Path) -> None:
    def identity(folder: Path) -> str | None:
        return adapter_identity(ModelConfig(path=str(base), adapter=str(folder)))

    adapter = save_adapter(tmp_path / "adapter", base)
    first = identity(adapter)
    assert first is not None and adapter_identity(ModelConfig(path=str(base))) is None
    edit_json(adapter / "adapter_config.json", base_model_name_or_path="elsewhere")
    assert identity(adapter.rename(tmp_path / "moved")) == first
    about = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())
    edit_json(tmp_path / "moved" / "adapter_config.json", lora_alpha=2 * about["lora_alpha"])
    assert identity(tmp_path / "moved") != first
