"""Quantised checkpoints: loaded where transformers can, compared with eager, refused with what is missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import (
    NUM_TOKENS,
    Tensors,
    edit_config,
    edit_weights,
    expected_greedy,
    greedy,
    load,
    reference,
    same,
    save_model,
)
from torch import nn

from pipeline.config import LoadFormat, ModelConfig
from pipeline.models.architecture import UnsupportedModel, read_architecture
from pipeline.models.load import inspect_model, load_model
from pipeline.models.self_check import check_step_equals_eager

# int8 weights, one scale a row, as `compressed-tensors` writes them.
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "format": "int-quantized",
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
}


def quantise(tensors: Tensors) -> None:
    """Each projection as int8 and a scale per row."""
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors[name]
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale


def unpack(tensors: Tensors) -> None:
    """What such tensors stand for."""
    for name in [n for n in tensors if n.endswith("_scale")]:
        scale = tensors.pop(name)
        tensors[name.removesuffix("_scale")] = tensors[name.removesuffix("_scale")].float() * scale


def test_compressed_tensors_run_and_equal_what_they_stand_for(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the checkpoint's package")
    packed = edit_weights(save_model(tmp_path / "packed"), quantise)
    edit_config(packed, quantization_config=INT8)
    plain = edit_weights(edit_weights(save_model(tmp_path / "plain"), quantise), unpack)
    assert same(greedy(load(packed)), expected_greedy(reference(plain)))


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "optimum"),
        ({"quant_method": "awq", "bits": 4}, "gptqmodel"),
        (INT8, "compressed"),
    ],
    ids=["bitsandbytes", "gptq", "awq", "compressed-tensors"],
)
def test_a_missing_package_is_named_before_weights_are_read(
    tmp_path: Path, settings: dict[str, Any], package: str
) -> None:
    if find_spec(package) or (settings is INT8 and find_spec("compressed_tensors")):
        pytest.skip(f"{package} is installed")
    folder = edit_config(save_model(tmp_path), quantization_config=settings)
    with pytest.raises(ValueError, match="cannot be loaded here") as caught:
        inspect_model(ModelConfig(path=str(folder)))
    said = str(caught.value)
    assert f"quant_method {settings['quant_method']}" in said and package in said and "\n" not in said


class ScaledByTheBatch(nn.Linear):
    """Rounds its input in steps of the whole batch's largest value, as static-less 8-bit layers may do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = x.abs().max() / 7
        return super().forward((x / step).round() * step)


def test_a_layer_that_looks_at_the_whole_batch_is_noticed(tmp_path: Path) -> None:
    loaded = load(save_model(tmp_path))
    check_step_equals_eager(loaded.model, loaded.architecture)
    mlp = loaded.model.model.layers[0].mlp
    rounding = ScaledByTheBatch(64, 96, bias=False)
    rounding.load_state_dict(mlp.up_proj.state_dict())
    mlp.up_proj = rounding
    with pytest.raises(UnsupportedModel, match="packed rows than for each alone.*unquantised"):
        check_step_equals_eager(loaded.model, loaded.architecture)


def test_the_check_uses_the_engines_windows_and_leaves_its_attention(tmp_path: Path) -> None:
    loaded = load(save_model(tmp_path, "mistral", sliding_window=4))
    check_step_equals_eager(loaded.model, read_architecture(loaded.model.config))
    assert loaded.model.config._attn_implementation == "tokenmill"
    assert same(greedy(loaded), expected_greedy(reference(tmp_path)))


def test_only_quantised_models_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a plain model was run")

    monkeypatch.setattr("pipeline.models.load.check_step_equals_eager", never)
    folder = save_model(tmp_path)
    load(folder)
    config = ModelConfig(path=str(folder), load_format=LoadFormat.dummy)
    assert load_model(config).vocab_size == NUM_TOKENS
    with pytest.raises(AssertionError, match="was run"):
        pytest.importorskip("compressed_tensors", reason="the checkpoint's package")
        edit_weights(folder, quantise)
        load(edit_config(folder, quantization_config=INT8))
