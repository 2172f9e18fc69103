"""Weight files that are missing, cut short or none, found by their frame alone."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from pipeline.config import LoadFormat, ModelConfig
from pipeline.models.weight_files import check_weight_files


@pytest.fixture
def folder(tmp_path):
    save_file({"a": torch.ones(3, 5), "b": torch.zeros(7)}, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def check(folder, **keys):
    check_weight_files(ModelConfig(path=str(folder), **keys))


def test_whole_files_pass(folder):
    check(folder)
    save_file({}, folder / "empty.safetensors")
    (folder / "other.bin").write_bytes(b"of a format that is not looked into")
    check(folder)


def test_names_on_the_hub_and_random_weights_are_not_checked(tmp_path):
    check("organisation/model")
    check(tmp_path, load_format=LoadFormat.dummy)


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
def test_a_file_cut_anywhere_is_found(folder, kept):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.path=.*model.safetensors is cut short.*fetch.*again"):
        check(folder)


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"a": {}}', b'{"a": 1}', b"\xff"])
def test_a_header_of_another_kind_is_found(folder, header):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="is cut short or no safetensors file"):
        check(folder)


def test_no_file_and_a_missing_shard_are_named(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(ValueError, match=re.escape("lacks model-2.safetensors")):
        check(folder)
    index.write_text("[]")
    with pytest.raises(ValueError, match="index.json is damaged"):
        check(folder)
    index.unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no weights.*model.load_format=dummy"):
        check(folder)
