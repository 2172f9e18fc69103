"""A model's identity: the same for the same weights wherever they lie, another for any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_folders import edit_config, edit_weights, save_model

from pipeline.config import ModelConfig
from pipeline.models import identity
from pipeline.models.load import inspect_model, load_tokenizer


def identity_of(folder: Path) -> dict[str, str | None]:
    config = ModelConfig(path=str(folder))
    return identity.model_identity(config, inspect_model(config), load_tokenizer(config))


def test_a_folder_may_move_and_its_configuration_may_not_change(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "here")
    first = identity_of(folder)
    assert first == identity_of(folder.rename(tmp_path / "there"))
    edit_config(tmp_path / "there", rms_norm_eps=1e-3)
    second = identity_of(tmp_path / "there")
    assert [key for key in first if first[key] != second[key]] == ["model.config"]


@pytest.mark.parametrize("whole", [True, False], ids=["read whole", "sampled"])
def test_a_change_in_the_middle_of_the_weights_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """One projection trained further, as merging an adapter would do it: both ends of the file stay."""
    if not whole:
        monkeypatch.setattr(identity, "_WHOLE_BYTES", 0)
        monkeypatch.setattr(identity, "_END_BYTES", 4096)
        monkeypatch.setattr(identity, "_PIECES", 64)
    folder = save_model(tmp_path)
    before = identity_of(folder)

    def train(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"] *= 1.01

    file = folder / "model.safetensors"
    old = file.read_bytes()
    edit_weights(folder, train)
    new = file.read_bytes()
    assert (len(old), old[:4096], old[-4096:]) == (len(new), new[:4096], new[-4096:])
    after = identity_of(folder)
    assert [key for key in before if before[key] != after[key]] == ["model.weights"]
