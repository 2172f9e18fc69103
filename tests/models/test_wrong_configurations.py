"""Folders that are slightly wrong or unusual: each runs as transformers runs it, or is refused with a reason.

`RUNS` and `REFUSED` are the two tables; a folder is made by hand, changed in one place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_folders import (
    NUM_TOKENS,
    edit_config,
    edit_json,
    edit_weights,
    expected_greedy,
    greedy,
    load,
    reference,
    same,
    save_model,
)
from transformers import LlavaConfig, T5Config

from pipeline.config import ModelConfig, PromptConfig
from pipeline.models.load import inspect_model, load_tokenizer, stop_ids
from pipeline.prompts.chat import ChatTemplate

Make = Callable[[Path], Path]


def no_generation_config(folder: Path) -> Path:
    save_model(folder, eos_token_id=[1, 40, 77])
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def no_pad_token(folder: Path) -> Path:
    save_model(folder)
    edit_json(folder / "tokenizer_config.json", pad_token=...)
    return folder


def stops_in_generation_config(folder: Path) -> Path:
    save_model(folder, eos_token_id=None)
    edit_json(folder / "generation_config.json", eos_token_id=[40, 77, 101, 5])
    return folder


def no_eos_anywhere(folder: Path) -> Path:
    save_model(folder, eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=...)
    return folder


def foreign_tensor(folder: Path) -> Path:
    return edit_weights(
        save_model(folder), lambda t: t.update({"vision_tower.proj.weight": torch.ones(3, 3)})
    )


def old_buffers(folder: Path) -> Path:
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    return edit_weights(save_model(folder), lambda t: t.update(buffers))


# What it is -> how to make it, and the ids that end a row.
RUNS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "head_dim missing": (lambda f: edit_config(save_model(f), head_dim=...), (1,)),
    "tied weights missing from the file": (lambda f: save_model(f, "qwen3"), (1,)),
    "no generation_config": (no_generation_config, (1, 40, 77)),
    "generation_config with several stop ids": (stops_in_generation_config, (1, 5, 40, 77, 101)),
    "no pad token": (no_pad_token, (1,)),
    "no eos anywhere": (no_eos_anywhere, ()),
    "rope_parameters missing": (lambda f: edit_config(save_model(f), rope_parameters=...), (1,)),
    "rope_parameters without a type": (
        lambda f: edit_config(save_model(f), rope_parameters={"rope_theta": 500.0}),
        (1,),
    ),
    "max_position_embeddings missing": (
        lambda f: edit_config(save_model(f), max_position_embeddings=...),
        (1,),
    ),
    "torch_dtype of old": (
        lambda f: edit_config(save_model(f), dtype=..., torch_dtype="bfloat16"),
        (1,),
    ),
    "architectures names no class": (
        lambda f: edit_config(save_model(f), architectures=["LlamaForDreaming"]),
        (1,),
    ),
    "tensors of something else": (foreign_tensor, (1,)),
    "buffers of old": (old_buffers, (1,)),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_as_transformers_runs_it(tmp_path, name):
    make, eos = RUNS[name]
    folder = make(tmp_path)
    loaded = load(folder)
    assert loaded.eos_ids == eos
    assert same(greedy(loaded), expected_greedy(reference(folder), eos or (NUM_TOKENS + 1,)))


def lacks(*names: str) -> Callable[[dict], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def truncated(folder: Path) -> Path:
    file = save_model(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return folder


def missing_shard(folder: Path) -> Path:
    save_model(folder, shards="60KB")
    sorted(folder.glob("model-*.safetensors"))[1].unlink()
    return folder


def encoder_decoder(folder: Path) -> Path:
    T5Config(d_model=32, num_layers=2, num_heads=4, vocab_size=NUM_TOKENS).save_pretrained(folder)
    return folder


def multimodal(folder: Path) -> Path:
    LlavaConfig().save_pretrained(folder)
    return folder


def own_code(folder: Path) -> Path:
    code = {"AutoConfig": "configuration_dreamer.DreamerConfig"}
    return edit_config(save_model(folder), model_type="dreamer", auto_map=code)


def adapter_folder(folder: Path) -> Path:
    edit_json(save_model(folder) / "adapter_config.json", peft_type="LORA")
    return folder


def no_json(folder: Path) -> Path:
    (save_model(folder) / "config.json").write_text("{nope")
    return folder


# What it is -> how to make it, and words of the refusal. All are said before weights are read.
REFUSED: dict[str, tuple[Make, list[str]]] = {
    "kv heads that do not divide": (
        lambda f: edit_config(save_model(f), num_key_value_heads=3),
        ["num_attention_heads=4", "num_key_value_heads=3"],
    ),
    "kv heads missing, where the class assumes 8": (
        lambda f: edit_config(save_model(f, "mistral"), num_key_value_heads=...),
        ["num_attention_heads=4", "num_key_value_heads=8"],
    ),
    "no layers": (lambda f: edit_config(save_model(f), num_hidden_layers=0), ["num_hidden_layers=0"]),
    "layer_types too short": (
        lambda f: edit_config(save_model(f, "qwen3"), layer_types=["full_attention"]),
        ["num_hidden_layers", "layer_types", "(1)"],
    ),
    "sliding layers without a window": (
        lambda f: edit_config(
            save_model(f, "qwen3"),
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=None,
            use_sliding_window=True,
        ),
        ["sliding_window", "is not set"],
    ),
    "unknown rope_type": (
        lambda f: edit_config(save_model(f), rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        ["rope_type=spiral", "llama3"],
    ),
    "max_position_embeddings null": (
        lambda f: edit_config(save_model(f), max_position_embeddings=None),
        ["max_position_embeddings"],
    ),
    "weird dtype": (lambda f: edit_config(save_model(f), dtype="float33"), ["float33"]),
    "a size as text": (lambda f: edit_config(save_model(f), hidden_size="64"), ["hidden_size", "str"]),
    "unknown model_type": (lambda f: edit_config(save_model(f), model_type="llamaram"), ["llamaram"]),
    "no model_type": (lambda f: edit_config(save_model(f), model_type=...), ["model_type"]),
    "no JSON": (no_json, ["JSON"]),
    "safetensors cut short": (truncated, ["model.safetensors is cut short", "fetch the model again"]),
    "index names a missing shard": (missing_shard, ["lacks model-00002-of-"]),
    "unknown quantisation": (
        lambda f: edit_config(save_model(f), quantization_config={"quant_method": "float7"}),
        ["float7", "does not know", "unquantised"],
    ),
    "quantisation without a method": (
        lambda f: edit_config(save_model(f), quantization_config={"bits": 4}),
        ["(none)", "unquantised"],
    ),
    "a classifier": (
        lambda f: edit_config(save_model(f, "qwen3"), architectures=["Qwen3ForSequenceClassification"]),
        ["Qwen3ForSequenceClassification does not generate text"],
    ),
    "encoder-decoder": (encoder_decoder, ["encoder-decoder", "t5"]),
    "multimodal": (multimodal, ["multimodal", "vision_config"]),
    "code of its own": (own_code, ["model.trust_remote_code=true", "code of its own"]),
    "an adapter in place of a model": (adapter_folder, ["is an adapter", "model.adapter"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_weights_are_read(tmp_path, name):
    make, words = REFUSED[name]
    make(tmp_path)
    with pytest.raises(ValueError) as caught:
        inspect_model(ModelConfig(path=str(tmp_path)))
    said = str(caught.value)
    assert [word for word in words if word not in said] == []
    assert "model.path" in said and "\n" not in said


# Weights that are not the configuration's: transformers would make tensors up, or leave some out.
NOT_ITS_OWN: dict[str, tuple[Make, list[str]]] = {
    "a tensor missing": (
        lambda f: edit_weights(save_model(f), lacks("model.layers.1.mlp.up_proj.weight")),
        ["model.layers.1.mlp.up_proj.weight is missing"],
    ),
    "a bias missing": (
        lambda f: edit_weights(save_model(f, "qwen2"), lacks("model.layers.1.self_attn.q_proj.bias")),
        ["model.layers.1.self_attn.q_proj.bias is missing"],
    ),
    "a head missing, not tied": (
        lambda f: edit_weights(save_model(f), lacks("lm_head.weight")),
        ["lm_head.weight is missing"],
    ),
    "another shape": (
        lambda f: edit_weights(
            save_model(f), lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.ones(96, 32)})
        ),
        ["model.layers.1.mlp.up_proj.weight has shape [96, 32]", "asks for [96, 64]"],
    ),
    "head_dim missing where it is no quotient": (
        lambda f: edit_config(save_model(f, "qwen3"), head_dim=...),
        ["has shape [16]", "asks for [128]"],
    ),
    "more layers than the configuration": (
        lambda f: edit_config(save_model(f), num_hidden_layers=1),
        ["model.layers.1.", "num_hidden_layers"],
    ),
    "a bias that the configuration leaves out": (
        lambda f: edit_weights(
            save_model(f), lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(64)})
        ),
        ["model.layers.1.self_attn.q_proj.bias", "attention_bias"],
    ),
    "scales of a quantisation that is not mentioned": (
        lambda f: edit_weights(
            save_model(f), lambda t: t.update({"model.layers.1.mlp.up_proj.weight_scale": torch.ones(1)})
        ),
        ["weight_scale", "quantization_config"],
    ),
}


@pytest.mark.parametrize("name", NOT_ITS_OWN)
def test_weights_that_are_not_the_models_are_refused(tmp_path, name):
    make, words = NOT_ITS_OWN[name]
    make(tmp_path)
    with pytest.raises(ValueError) as caught:
        load(tmp_path)
    said = str(caught.value)
    assert [word for word in words if word not in said] == []
    assert f"model.path={tmp_path}" in said and "\n" not in said


def test_ids_that_only_pad_the_vocabulary_are_never_sampled(tmp_path):
    save_model(tmp_path, vocab_size=NUM_TOKENS + 64)

    def favour_padding(tensors):
        tensors["lm_head.weight"][NUM_TOKENS:] *= 50

    edit_weights(tmp_path, favour_padding)
    loaded = load(tmp_path)
    assert loaded.vocab_size == NUM_TOKENS
    model = reference(tmp_path)
    assert max(ids.max() for ids in expected_greedy(model)) >= NUM_TOKENS
    model.generation_config.suppress_tokens = list(range(NUM_TOKENS, NUM_TOKENS + 64))
    assert same(greedy(loaded), expected_greedy(model))


def test_a_tokenizer_larger_than_the_vocabulary_runs_within_it(tmp_path):
    loaded = load(save_model(tmp_path, vocab_size=NUM_TOKENS - 20))
    assert loaded.vocab_size == NUM_TOKENS - 20
    assert same(greedy(loaded), expected_greedy(reference(tmp_path)))


def test_stop_ids_are_the_same_before_and_after_the_weights(tmp_path):
    inspected = inspect_model(ModelConfig(path=str(no_generation_config(tmp_path))))
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    known = stop_ids(inspected.generation_config or inspected.hf_config, tokenizer)
    assert known == load(tmp_path).eos_ids


def template_of(folder: Path, template: object, **prompt: object) -> ChatTemplate:
    save_model(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    return ChatTemplate(tokenizer, PromptConfig(column="text", **prompt), str(folder))


NEEDS_TOOLS = "{{ raise_exception('no tools') if not tools }}{{ tools | length }}{{ messages[0]['content'] }}"


def test_a_template_that_needs_tools_says_so_and_takes_them(tmp_path):
    with pytest.raises(ValueError, match="no tools"):
        template_of(tmp_path, NEEDS_TOOLS).ask("Hi")
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert template_of(tmp_path, NEEDS_TOOLS, chat_template_kwargs={"tools": tools}).ask("Hi") == "1Hi"


SEVERAL = [
    {"name": "default", "template": "<{{ messages[0]['content'] }}>"},
    {"name": "rag", "template": "rag"},
]


def test_of_several_templates_the_default_is_taken(tmp_path):
    assert template_of(tmp_path, SEVERAL).ask("Hi") == "<Hi>"


def test_another_of_several_templates_is_chosen_by_name(tmp_path):
    assert template_of(tmp_path, SEVERAL, chat_template_kwargs={"chat_template": "rag"}).ask("Hi") == "rag"


def test_several_templates_without_a_default_are_refused(tmp_path):
    with pytest.raises(ValueError, match="prompt.chat=model"):
        template_of(tmp_path, SEVERAL[1:])


DREAMER = """
from transformers import LlamaConfig, LlamaForCausalLM
class DreamerConfig(LlamaConfig):
    model_type = "dreamer"
class DreamerForCausalLM(LlamaForCausalLM):
    config_class = DreamerConfig
"""


def test_code_of_its_own_runs_when_allowed(tmp_path, monkeypatch):
    # transformers copies the code here and imports it from here.
    modules = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = save_model(tmp_path / "dreamer")
    (folder / "dreamer.py").write_text(DREAMER)
    code = {"AutoConfig": "dreamer.DreamerConfig", "AutoModelForCausalLM": "dreamer.DreamerForCausalLM"}
    edit_config(folder, model_type="dreamer", auto_map=code, architectures=["DreamerForCausalLM"])
    loaded = load(folder, trust_remote_code=True)
    assert type(loaded.model).__name__ == "DreamerForCausalLM"
    assert same(greedy(loaded), expected_greedy(reference(folder, trust_remote_code=True)))
