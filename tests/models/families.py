"""The model families that the README's table speaks of, each as a small random configuration.

Two to four layers, 128 ids, a window of 16 positions and an original RoPE range of 24 where the
family has one. Knows configurations and what is to be said of those that cannot run; refuses to
know how they are run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

VOCABULARY = 128
LONGEST_ROW = 96
WINDOW = 16
ORIGINAL_RANGE = 24


@dataclass(frozen=True)
class Family:
    """kind, changes: transformers' model_type and its settings beside the shared ones.

    seed: of the random weights. max_model_len: rows stay within it. refusal: words of the message if
    the engine must refuse the family; empty if it runs. since: the transformers whose class calls the
    attention by its name; with older ones the family is refused.
    """

    name: str
    kind: str
    changes: dict[str, Any]
    seed: int = 0
    max_model_len: int | None = None
    refusal: tuple[str, ...] = ()
    since: str = "0"

    @property
    def runs_here(self) -> bool:
        return not self.refusal and Version(transformers.__version__) >= Version(self.since)

    def config(self, **changes: Any) -> Any:
        settings = {**_SHARED, **self.changes, **changes}
        return CONFIG_MAPPING[self.kind](**{k: v for k, v in settings.items() if v is not _ABSENT})


# Takes a shared setting away.
_ABSENT = object()
_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LONGEST_ROW,
    # Large, so that logits lie far apart and different contexts give different tokens.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# For families whose heads all have keys of their own, under names of their own.
_ALL_HEADS = {"num_key_value_heads": _ABSENT, "head_dim": _ABSENT}
_OLD_NAMES = {
    "n_positions": LONGEST_ROW,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        ),
        _ABSENT,
    ),
    **_ALL_HEADS,
}
_SLIDING = {"sliding_window": WINDOW}
_ALTERNATING = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
_TWICE = {
    **_SLIDING,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_STRETCHED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_RANGE}
_YARN = {"rope_type": "yarn", **_STRETCHED}
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_STRETCHED}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, **_STRETCHED}
_DYNAMIC = {"rope_type": "dynamic", **_STRETCHED}
_DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
_LONG_PHI3 = {"rope_parameters": _LONGROPE, "original_max_position_embeddings": ORIGINAL_RANGE}
# Cohere divides its logits by 16, which brings those of so small a model close together.
_UNSCALED = {"logit_scale": 1.0}
_GEMMA2 = {
    **_ALTERNATING,
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 20.0,
}
_GEMMA3 = {
    **_TWICE,
    "query_pre_attn_scalar": 8,
    "rope_parameters": {
        "sliding_attention": _DEFAULT,
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
}

RUN = (
    Family("Llama", "llama", {}),
    Family("Llama, llama3 RoPE", "llama", {"rope_parameters": _LLAMA3}),
    Family("Llama, YaRN", "llama", {"rope_parameters": _YARN}),
    Family("Qwen2", "qwen2", {}, seed=1),
    Family("Qwen2-MoE", "qwen2_moe", {"shared_expert_intermediate_size": 16, **_EXPERTS}, seed=1),
    Family("Qwen3", "qwen3", {"tie_word_embeddings": True}),
    Family("Qwen3-MoE", "qwen3_moe", _EXPERTS),
    Family("Mistral", "mistral", _SLIDING),
    Family("Mixtral", "mixtral", {"sliding_window": None, **_LOCAL_EXPERTS}, seed=1),
    Family("Gemma", "gemma", {}, seed=1),
    Family("Gemma 2", "gemma2", _GEMMA2, seed=1),
    Family("Gemma 3, text", "gemma3_text", _GEMMA3),
    Family("Phi", "phi", {}, seed=3),
    Family("Phi-3", "phi3", _SLIDING),
    Family("Phi-3, long RoPE, within its original range", "phi3", _LONG_PHI3, max_model_len=ORIGINAL_RANGE),
    Family("GPT-OSS", "gpt_oss", {**_TWICE, **_LOCAL_EXPERTS, "rope_parameters": _YARN}),
    Family("OLMo 2", "olmo2", {}, seed=1),
    Family(
        "OLMo 3",
        "olmo3",
        {
            **_ALTERNATING,
            "rope_parameters": {"sliding_attention": _DEFAULT, "full_attention": _YARN},
        },
    ),
    Family(
        "Granite",
        "granite",
        {
            "attention_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 1.5,
        },
        seed=1,
    ),
    Family("SmolLM3", "smollm3", {"no_rope_layers": [1, 0]}, seed=2),
    Family("StarCoder2", "starcoder2", _SLIDING),
    Family("GPT-NeoX, Pythia", "gpt_neox", _ALL_HEADS),
    Family("GPT-2", "gpt2", _OLD_NAMES),
    Family("GPT-J, transformers 5.24 and later", "gptj", {**_OLD_NAMES, "rotary_dim": 4}, since="5.24.0"),
    Family("OPT", "opt", {**_ALL_HEADS, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}, seed=2),
    Family("Cohere", "cohere", _UNSCALED, seed=1),
    Family("Cohere 2", "cohere2", {**_ALTERNATING, **_UNSCALED}, seed=1),
    Family("GLM-4", "glm4", {}),
    Family("ERNIE 4.5", "ernie4_5", {}),
    Family("EXAONE 4", "exaone4", _ALTERNATING, seed=1),
)

_ELSEWHERE = "engine=transformers may run it"
_OTHER_LOGITS = ("gives other logits", "eager", "wrong text", _ELSEWHERE)
_STATES = ("linear_attention", "full and sliding-window attention only", _ELSEWHERE)
REFUSED = (
    Family("Falcon", "falcon", {**_ALL_HEADS, "ffn_hidden_size": 48}, refusal=_OTHER_LOGITS),
    Family(
        "GPT-Neo",
        "gpt_neo",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
        },
        refusal=_OTHER_LOGITS,
    ),
    Family(
        "BLOOM",
        "bloom",
        {"n_layer": 2, "n_head": 4, "max_position_embeddings": _ABSENT},
        refusal=("has no max_position_embeddings", _ELSEWHERE),
    ),
    Family(
        "MPT",
        "mpt",
        {
            "n_layers": 2,
            "n_heads": 4,
            "d_model": 32,
            "max_seq_len": LONGEST_ROW,
            "max_position_embeddings": _ABSENT,
        },
        refusal=("has no max_position_embeddings", _ELSEWHERE),
    ),
    Family(
        "Llama 4, text",
        "llama4_text",
        {"attention_chunk_size": 16, "num_hidden_layers": 4, "num_local_experts": 2},
        refusal=("chunked_attention", "full and sliding-window attention only", _ELSEWHERE),
    ),
    Family("Qwen3-Next", "qwen3_next", {"num_hidden_layers": 4, **_EXPERTS}, refusal=_STATES),
    Family("Mamba", "mamba", {"state_size": 4}, refusal=_STATES),
    Family(
        "Jamba",
        "jamba",
        {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
        refusal=_STATES,
    ),
    Family(
        "T5",
        "t5",
        {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 48},
        refusal=("encoder-decoder", "decoders only"),
    ),
    Family("BART", "bart", {"d_model": 32}, refusal=("encoder-decoder", "decoders only")),
    Family(
        "Qwen2-VL",
        "qwen2_vl",
        {},
        refusal=("multimodal", "vision_config", "text-only checkpoint", _ELSEWHERE),
    ),
    Family(
        "Llama, dynamic RoPE past its original range",
        "llama",
        {"rope_parameters": _DYNAMIC},
        refusal=(
            "dynamic RoPE",
            "longest row of a batch",
            f"model.max_model_len={ORIGINAL_RANGE} or less",
        ),
    ),
    Family(
        "Phi-3, long RoPE past its original range",
        "phi3",
        _LONG_PHI3,
        refusal=(
            "longrope RoPE",
            "longest row of a batch",
            f"model.max_model_len={ORIGINAL_RANGE} or less",
        ),
    ),
)
FAMILIES = RUN + REFUSED


def family(name: str) -> Family:
    (found,) = (one for one in FAMILIES if one.name == name)
    return found
