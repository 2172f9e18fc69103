"""Loading: configuration, proof, weights, in this order, and mistakes named with key and remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import SHIPPED, PieceTokenizer, by_key, family_config, make_engine, random_model, request
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from pipeline.config import Device, Dtype, LoadFormat, ModelConfig
from pipeline.engine import Engine, SamplingParams
from pipeline.models.architecture import UnsupportedModel
from pipeline.models.attention import ATTENTION_NAME
from pipeline.models.load import (
    load_model,
    load_tokenizer,
    read_config,
    resolve_dtype,
    stop_ids,
    wrap_model,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped model that a test may break."""
    return Path(shutil.copytree(SHIPPED, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_shipped_model() -> None:
    config = ModelConfig(path=str(SHIPPED))
    loaded = load_model(config, load_tokenizer(config))
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_ids) == (1024, 512, (1,))
    assert loaded.dtype == torch.float32 and loaded.device.type == "cpu"
    assert not any(p.requires_grad for p in loaded.model.parameters()) and not loaded.model.training
    assert loaded.model.config._attn_implementation == ATTENTION_NAME


def test_a_library_user_needs_three_lines() -> None:
    engine = Engine.from_pretrained(str(SHIPPED), seed=1, max_model_len=64)
    ids = engine.loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Compute 60 + 23."}], add_generation_prompt=True, return_dict=False
    )
    (completion,) = engine.generate([request(0, ids, max_tokens=30)])
    assert completion.text == "60 + 23 = 83" and engine.loaded.max_model_len == 64
    assert isinstance(completion.request.params, SamplingParams)


def test_max_model_len_past_the_models_range() -> None:
    with pytest.raises(ValueError, match=r"model\.max_model_len=513 .*512.*lower it"):
        load_model(ModelConfig(path=str(SHIPPED), max_model_len=513))


def test_no_such_folder(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    for read in (read_config, load_model, load_tokenizer):
        with pytest.raises(ValueError, match=r"model\.path=.*nowhere.*no such folder"):
            read(ModelConfig(path=missing))


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"model\.path=.*no config\.json"):
        load_model(ModelConfig(path=str(folder)))


def test_a_folder_without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match=r"model\.path=.*tokenizer.*set model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(folder)))
    assert len(load_tokenizer(ModelConfig(path=str(folder), tokenizer=str(SHIPPED)))) == 1024
    with pytest.raises(ValueError, match=r"model\.tokenizer="):
        load_tokenizer(ModelConfig(path=str(SHIPPED), tokenizer=str(folder)))


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.path=.*no weights"):
        load_model(ModelConfig(path=str(folder)))


def test_torn_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    with pytest.raises(ValueError, match=r"model\.path=.*cut short"):
        load_model(ModelConfig(path=str(folder)))


@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_weights_that_do_not_fit_the_configuration(folder: Path, fault: str) -> None:
    """transformers fills what is missing with random numbers and a warning: fluent nonsense."""
    name = "model.layers.2.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    if fault == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.path=.*layers\.2\.mlp\.up_proj"):
        load_model(ModelConfig(path=str(folder)))


def test_a_model_that_cannot_run_is_refused_before_its_weights_are_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    edit_config(folder, rope_parameters=rope)
    with pytest.raises(UnsupportedModel, match=r"dynamic RoPE.*model.max_model_len"):
        load_model(ModelConfig(path=str(folder)))


def test_several_stop_ids_come_together(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [7, 3]}))
    config = ModelConfig(path=str(folder))
    assert load_model(config, load_tokenizer(config)).eos_ids == (1, 3, 7)
    assert load_model(config).eos_ids == (3, 7)


def test_without_a_generation_config_the_configurations_own_stop_counts(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert load_model(ModelConfig(path=str(folder))).eos_ids == (1,)


def test_stop_ids() -> None:
    tokenizer = PieceTokenizer([], eos_token_id=4)
    assert stop_ids(GenerationConfig(eos_token_id=[9, 2]), tokenizer) == (2, 4, 9)
    assert stop_ids(GenerationConfig(eos_token_id=4), tokenizer) == (4,)
    assert stop_ids(None, None) == ()


def test_a_tokenizer_smaller_than_the_embedding_hides_the_padding() -> None:
    """Padding ids get the largest logits of all: they must still never come out."""
    model = random_model(family_config("llama"))
    model.lm_head.weight.data[100:] = 50 * model.lm_head.weight.data[:28]
    model.lm_head.weight.data[114:] *= -1
    loaded = wrap_model(model, tokenizer=PieceTokenizer([b"x"] * 100))
    assert loaded.vocab_size == 100
    engine = make_engine(loaded, num_topk=4)
    rows = [
        request(
            i,
            [i, 3, 5],
            max_tokens=12,
            temperature=float(i % 2),
            ignore_eos=True,
            logprobs=True,
            top_logprobs=4,
        )
        for i in range(20)
    ]
    for completion in by_key(engine.generate(rows)).values():
        assert completion.topk_ids is not None and completion.logprobs is not None
        assert completion.token_ids.max() < 100 and completion.topk_ids.max() < 100
        assert np.isfinite(completion.logprobs).all()


def test_dummy_weights_need_none(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    loaded = load_model(ModelConfig(path=str(folder), load_format=LoadFormat.dummy))
    assert all(torch.isfinite(p).all() for p in loaded.model.parameters())
    (completion,) = make_engine(loaded).generate([request(0, [5, 6], max_tokens=3, ignore_eos=True)])
    assert len(completion.token_ids) == 3


def test_types() -> None:
    config = family_config("llama", dtype="bfloat16")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype(Dtype.auto, config, cpu) == torch.float32
    assert resolve_dtype(Dtype.auto, config, gpu) == torch.bfloat16
    assert resolve_dtype(Dtype.float16, config, cpu) == torch.float16
    loaded = load_model(ModelConfig(path=str(SHIPPED), dtype=Dtype.bfloat16))
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what is said to be missing")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"model\.device=cuda.*model\.device=auto"):
        load_model(ModelConfig(path=str(SHIPPED), device=Device.cuda))
