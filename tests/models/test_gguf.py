"""GGUF files: loaded as the same model in transformers' own format, dequantised, tokenizer included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import SHIPPED, family_config, random_model
from model_folders import NUM_TOKENS, expected_greedy, greedy, load, same
from transformers import AutoTokenizer

from pipeline.config import ModelConfig
from pipeline.models.gguf import rules_of_transformers
from pipeline.models.identity import model_identity
from pipeline.models.load import inspect_model, load_tokenizer

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="needs the extra gguf")


def write_gguf(file: Path, model: Any, quantised: bool = False, **changes: str) -> Path:
    """A Qwen3 model with the shipped tokenizer, as llama.cpp's converter would write it."""
    config = model.config
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer, **{"model": "gpt2", "cut": "gpt-2", **changes})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        short = names.get_name(name, try_suffixes=(".weight",))
        values = tensor.numpy().astype(np.float32)
        if quantised and values.ndim == 2:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(short, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(short, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: Any, model: str, cut: str) -> None:
    content = json.loads((SHIPPED / "tokenizer.json").read_text())
    vocabulary = {**content["model"]["vocab"], **{t["content"]: t["id"] for t in content["added_tokens"]}}
    special = {token["content"] for token in content["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    assert len(tokens) == NUM_TOKENS
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(cut)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in content["model"]["merges"]])
    writer.add_eos_token_id(1)


@pytest.fixture(scope="module")
def model() -> Any:
    # 128, because transformers does not read the width of a head from the file.
    return random_model(family_config("qwen3", vocab_size=NUM_TOKENS, head_dim=128))


@pytest.mark.parametrize("by", ["path", "gguf_file"])
def test_the_same_text_as_the_model_it_was_made_from(tmp_path: Path, model: Any, by: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", model)
    # Versions of transformers that cannot read the file's tokenizer are told of one.
    own = {"tokenizer": str(SHIPPED)} if rules_of_transformers() is None else {}
    loaded = load(file, **own) if by == "path" else load(tmp_path, gguf_file="tiny.gguf", **own)
    assert loaded.eos_ids == (1,) and loaded.max_model_len == 512
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.model.state_dict().items())
    assert same(greedy(loaded), expected_greedy(model))


def test_quantised_weights_are_unpacked(tmp_path: Path, model: Any) -> None:
    loaded = load(write_gguf(tmp_path / "tiny.gguf", model, quantised=True), tokenizer=str(SHIPPED))
    state = model.state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert tensor.dtype == torch.float32
        # Q8_0: blocks of 32 in steps of a 127th of the largest.
        assert float((tensor - state[name]).abs().max()) <= float(state[name].abs().max()) / 127
    assert len(greedy(loaded)) == 6


TEXTS = ["In 2026 there were 12345 cats.", "What is 3 + 47?\n\n don't", "x" * 5]


@pytest.mark.skipif(rules_of_transformers() is None, reason="this transformers does not read the rule")
@pytest.mark.parametrize("cut", ["gpt-2", "smollm"])
def test_the_tokenizer_cuts_text_as_the_model_learned_it(tmp_path: Path, model: Any, cut: str) -> None:
    config = ModelConfig(path=str(write_gguf(tmp_path / "tiny.gguf", model, cut=cut)))
    tokenizer = load_tokenizer(config)
    pieces = [p for p, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 2026")]
    assert pieces == (["in", "Ġ", "2", "0", "2", "6"] if cut == "smollm" else ["in", "Ġ2026"])
    assert all(tokenizer.decode(tokenizer(text)["input_ids"]) == text for text in TEXTS)


def test_a_cut_that_nobody_rebuilds_asks_for_the_tokenizer(tmp_path: Path, model: Any) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", model, cut="wild-bpe")
    why = "" if rules_of_transformers() is None else "`wild-bpe`"
    with pytest.raises(ValueError, match=rf"model\.gguf_file=tiny\.gguf.*{why}.*set model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(file)))
    own = load_tokenizer(ModelConfig(path=str(file), tokenizer=str(SHIPPED)))
    assert own.get_vocab() == AutoTokenizer.from_pretrained(SHIPPED).get_vocab()


def test_the_identity_is_of_the_chosen_file_wherever_it_lies(tmp_path: Path, model: Any) -> None:
    def weights(file: Path) -> str | None:
        config = ModelConfig(path=str(file), tokenizer=str(SHIPPED))
        return model_identity(config, inspect_model(config), load_tokenizer(config))["model.weights"]

    file = write_gguf(tmp_path / "tiny.gguf", model)
    first = weights(file)
    write_gguf(tmp_path / "other.gguf", model, quantised=True)
    assert weights(file) == first is not None
    assert weights(tmp_path / "other.gguf") != first
    (tmp_path / "elsewhere").mkdir()
    assert weights(file.rename(tmp_path / "elsewhere" / "renamed.gguf")) == first


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGML, once")
    with pytest.raises(ValueError, match=r"tiny\.gguf is no GGUF file"):
        inspect_model(ModelConfig(path=str(tmp_path / "tiny.gguf")))
    with pytest.raises(ValueError, match=r"model\.gguf_file=other\.gguf.*no other\.gguf"):
        inspect_model(ModelConfig(path=str(tmp_path), gguf_file="other.gguf"))


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"model\.path=a/b\.gguf .*leave model\.gguf_file=c\.gguf out"):
        ModelConfig(path="a/b.gguf", gguf_file="c.gguf")
    with pytest.raises(ValueError, match=r"model\.gguf_file=c\.bin .*ends in \.gguf"):
        ModelConfig(path="a", gguf_file="c.bin")
    config = ModelConfig(path="org/name/file.gguf")
    assert (config.path, config.gguf_file) == ("org/name", "file.gguf")
    config = ModelConfig(path="file.gguf")
    assert (config.path, config.gguf_file) == (".", "file.gguf")
