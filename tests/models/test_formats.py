"""Formats of plain checkpoints: shards, number types, random weights; names on the hub without a network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import shipped_tokenizer
from huggingface_hub import errors as hub
from model_folders import (
    NUM_TOKENS,
    edit_config,
    edit_weights,
    expected_greedy,
    greedy,
    load,
    reference,
    same,
    save_model,
)

from pipeline.config import Dtype, LoadFormat, ModelConfig
from pipeline.models.load import inspect_model, load_model, load_tokenizer, read_config
from pipeline.models.load_errors import explain_unreadable


def test_shards(tmp_path: Path) -> None:
    folder = save_model(tmp_path, shards="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert same(greedy(load(folder)), expected_greedy(reference(folder)))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_every_stored_type_runs_in_float32_on_the_cpu(tmp_path: Path, stored: str) -> None:
    dtype = getattr(torch, stored)
    folder = edit_config(save_model(tmp_path), dtype=stored)
    edit_weights(folder, lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items()}))
    loaded = load(folder)
    assert loaded.dtype == torch.float32
    assert same(greedy(loaded), expected_greedy(reference(folder)))


@pytest.mark.parametrize("dtype", [Dtype.bfloat16, Dtype.float16])
def test_half_types_run_on_the_cpu_and_bitwise_holds_or_is_refused(tmp_path: Path, dtype: Dtype) -> None:
    folder = save_model(tmp_path)
    loaded = load(folder, dtype=dtype)
    assert loaded.dtype == getattr(torch, dtype.value)
    texts = greedy(loaded, determinism="fast")
    # Greedy text in half types parts from transformers' own sooner or later; it starts alike.
    expected = expected_greedy(reference(folder, dtype=loaded.dtype))
    assert sum(int(t[0] == e[0]) for t, e in zip(texts, expected, strict=True)) >= len(texts) - 1
    try:
        alone = greedy(loaded, determinism="bitwise", max_num_seqs=1)
    except ValueError as error:
        assert "engine.determinism=bitwise" in str(error) and "engine.determinism=fast" in str(error)
    else:
        assert same(alone, greedy(loaded, determinism="bitwise"))


def test_random_weights_from_a_configuration_alone(tmp_path: Path) -> None:
    (save_model(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "generation_config.json").unlink()
    config = ModelConfig(path=str(tmp_path), load_format=LoadFormat.dummy)
    first, again = (load_model(config, load_tokenizer(config)) for _ in range(2))
    # A resumed job goes on with the same model.
    states = (first.model.state_dict(), again.model.state_dict())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert first.vocab_size == NUM_TOKENS and same(greedy(first), greedy(again))


def test_the_callers_random_numbers_are_left_alone(tmp_path: Path) -> None:
    config = ModelConfig(path=str(save_model(tmp_path)), load_format=LoadFormat.dummy)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(config)
    assert torch.equal(torch.rand(3), expected)


def test_a_name_on_the_hub_without_a_network_gives_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        try:
            raise hub.LocalEntryNotFoundError("An error happened\nwhile trying to locate the file")
        except hub.LocalEntryNotFoundError as error:
            raise OSError("We couldn't connect to the hub\nCheck your internet connection") from error

    monkeypatch.setattr("pipeline.models.revision.cached_file", unreachable)
    for name in ("AutoConfig", "AutoTokenizer"):
        monkeypatch.setattr(f"pipeline.models.load.{name}.from_pretrained", unreachable)
    models = [(inspect_model, "model.path"), (read_config, "model.path")]
    for read, key in [*models, (load_tokenizer, "model.tokenizer")]:
        with pytest.raises(ValueError) as caught:
            read(ModelConfig(path="someone/model", tokenizer="someone/model"))
        said = str(caught.value)
        assert said.startswith(f"{key}=someone/model") and "\n" not in said
        assert (
            "not in the cache" in said and "tokenmill prefetch" in said and f"set {key} to a folder" in said
        )


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (hub.GatedRepoError, "consent"),
        (hub.RepositoryNotFoundError, "hf auth login"),
        (hub.RevisionNotFoundError, "check model.revision"),
    ],
)
def test_what_the_hub_says_becomes_a_remedy(kind: type[Exception], said: str) -> None:
    cause = kind.__new__(kind)
    error = OSError("401\nClient Error")
    error.__cause__ = cause
    assert said in explain_unreadable("someone/model", "config.json", error)


def test_the_models_revision_is_not_asked_of_another_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def note(path: str, **options: object) -> object:
        asked.append((path, options.get("revision")))
        return shipped_tokenizer()

    monkeypatch.setattr("pipeline.models.load.AutoTokenizer.from_pretrained", note)
    load_tokenizer(ModelConfig(path="a/b", revision="v1"))
    load_tokenizer(ModelConfig(path="a/b", revision="v1", tokenizer="c/d"))
    assert asked == [("a/b", "v1"), ("c/d", None)]


def test_the_weights_come_from_the_commit_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two, the branch may move."""
    folder = save_model(tmp_path)
    pinned = replace(ModelConfig(path=str(folder)), revision="c" * 40)
    monkeypatch.setattr("pipeline.models.load.pin_revision", lambda _: pinned)
    asked: list[object] = []

    def note(*_: object, **options: object) -> None:
        asked.append(options["revision"])
        raise OSError("enough")

    monkeypatch.setattr("pipeline.models.weights.AutoModelForCausalLM.from_pretrained", note)
    with pytest.raises(ValueError, match="enough"):
        load_model(ModelConfig(path=str(folder), revision="main"))
    assert asked == ["c" * 40]


@pytest.mark.parametrize("absent", ["gguf", "accelerate"])
def test_a_missing_extra_is_named_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    monkeypatch.setattr(
        "pipeline.models.load_errors.find_spec", lambda name: None if name == absent else name
    )
    with pytest.raises(ValueError, match=rf"needs {absent}: pip install 'tokenmill\[gguf\]'$"):
        inspect_model(ModelConfig(path=str(tmp_path / "tiny.gguf")))


def test_a_checkpoint_with_an_index_of_nothing(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "gone.safetensors"}})
    )
    with pytest.raises(ValueError, match=r"lacks gone\.safetensors: fetch the model again"):
        inspect_model(ModelConfig(path=str(folder)))
