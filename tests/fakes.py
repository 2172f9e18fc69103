"""Small stand-ins shared by the tests: random models, a tokenizer of readable pieces, requests.

Knows how to make them and how transformers itself would answer; refuses to know the engine's parts.
Everything is seeded and made in memory; nothing needs a network.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

import pipeline.config
from pipeline.config import EngineConfig
from pipeline.engine import Completion, Engine, Request, RowKey, SamplingParams
from pipeline.engine.sampling_inputs import Draws
from pipeline.models.load import LoadedModel, stop_ids, wrap_model

SHIPPED = Path(pipeline.config.__file__).parent / "assets" / "tiny-model"
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
VOCABULARY = 128
# Several, as models have; frequent enough that a good part of the random rows ends by one.
EOS_IDS = (3, 29, 64, 77, 101)
SLIDING_WINDOW = 24
LONGEST_PROMPT = 200
# Enough to pass a block border, few enough to be quick; the 1 ends a row with its prefill.
_MAX_TOKENS = (12, 1, 40, 7, 24, 3)


@dataclass(frozen=True)
class Case:
    """A model ready for the engine, prompts for it, and what transformers' generate makes of each."""

    loaded: LoadedModel
    prompts: list[np.ndarray]
    max_tokens: list[int]
    expected: list[np.ndarray]

    @property
    def window(self) -> int | None:
        return getattr(self.loaded.model.config, "sliding_window", None)

    def fewest_blocks(self, block_size: int, max_num_batched_tokens: int) -> int:
        """The smallest engine.num_blocks that holds every row: the longest alone, and the null block."""
        seen = max(len(p) + n for p, n in zip(self.prompts, self.max_tokens, strict=True))
        if self.window is not None:
            # A window that begins and ends inside a block, and the longest chunk behind it.
            seen = min(seen, self.window - 1 + max_num_batched_tokens + block_size)
        return 1 + -(-seen // block_size)

    def requests(self) -> list[Request]:
        return [
            request(row, ids, max_tokens=limit)
            for row, (ids, limit) in enumerate(zip(self.prompts, self.max_tokens, strict=True))
        ]


def family_config(family: str, **changes: Any) -> Any:
    """Two layers; query heads per KV head: llama 2, qwen2 3, qwen3 8, mistral 1."""
    heads, kv_heads = {"llama": (4, 2), "qwen2": (6, 2), "qwen3": (8, 1), "mistral": (4, 4)}[family]
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "mistral": MistralConfig}[
        family
    ]
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16 * heads,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family == "qwen3",
        # Large, so that logits lie far apart and different contexts give different tokens.
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "mistral":
        sizes["sliding_window"] = SLIDING_WINDOW
    return kind(**{**sizes, **changes})


def random_model(config: Any, seed: int = 0) -> Any:
    """float32 with eager attention; biases and norm weights are random too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval().requires_grad_(False)


@cache
def loaded_family(family: str, tokenizer: Any = None) -> LoadedModel:
    """The family's random model, wrapped; the engine never changes it, so tests share it."""
    model = random_model(family_config(family))
    return wrap_model(
        model, tokenizer=tokenizer, generation_config=GenerationConfig(eos_token_id=list(EOS_IDS))
    )


def shipped_model() -> Any:
    """The shipped tiny model as transformers has it: float32, eager."""
    return AutoModelForCausalLM.from_pretrained(
        SHIPPED, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@cache
def shipped_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(SHIPPED)


def reference_generate(model: Any, ids: np.ndarray, max_new: int, eos: Sequence[int]) -> np.ndarray:
    """What transformers' own greedy generate adds to one prompt: int32, the stop id included."""
    prompt = torch.from_numpy(np.asarray(ids, np.int64))[None]
    with torch.no_grad():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new,
            do_sample=False,
            eos_token_id=list(eos),
            pad_token_id=0,
        )
    return out[0, len(ids) :].numpy().astype(np.int32)


def make_case(name: str) -> Case:
    """64 prompts through a family, or through the `shipped` model, one at a time by transformers."""
    if name == "shipped":
        model, tokenizer = shipped_model(), shipped_tokenizer()
        prompts, eos = _questions(tokenizer), stop_ids(model.generation_config, tokenizer)
        loaded = wrap_model(copy.deepcopy(model), tokenizer=tokenizer)
    else:
        # Its own instance: wrapping replaces a model's attention in place.
        model, loaded = random_model(family_config(name)), loaded_family(name)
        prompts, eos = mixed_prompts(64), EOS_IDS
    limits = [_MAX_TOKENS[i % len(_MAX_TOKENS)] for i in range(len(prompts))]
    expected = [reference_generate(model, p, n, eos) for p, n in zip(prompts, limits, strict=True)]
    return Case(loaded, prompts, limits, expected)


def mixed_prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    """Random ids, 1 to 200 a prompt; block borders among the lengths; every third begins alike."""
    rng = np.random.default_rng(seed)
    borders = [1, 2, 15, 16, 17, 31, 32, 33, 64, LONGEST_PROMPT]
    lengths = [*borders, *rng.integers(1, 120, max(0, count - len(borders))).tolist()][:count]
    shared = rng.integers(0, VOCABULARY, 2 * 32 + 5)
    prompts = [rng.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]
    for prompt in prompts[2::3]:
        prompt[: min(len(prompt) - 1, len(shared))] = shared[: min(len(prompt) - 1, len(shared))]
    return prompts


def _questions(tokenizer: Any) -> list[np.ndarray]:
    """What the shipped model was trained on, from one token to long conversations."""
    texts = [f"What is {3 * i} + {7 * i % 50}?" for i in range(16)]
    texts += [f"Which number is larger, {41 + i} or {97 - 3 * i}?" for i in range(12)]
    texts += [f"Put in ascending order: {i}, {17 - i}, 5, {2 * i}, 9" for i in range(12)]
    texts += [f"What is the capital of {c}?" for c in ("Peru", "France", "Japan", "Egypt", "Norway", "Chile")]
    earlier = [{"role": "user", "content": "Reverse this list: island, ocean, apple, river, stone"}]
    earlier += [{"role": "assistant", "content": "stone, river, apple, ocean, island"}]
    dialogues = [[{"role": "user", "content": t}] for t in texts]
    dialogues += [earlier * (1 + i % 4) + dialogues[i * 3 % len(texts)] for i in range(64 - len(texts) - 1)]
    prompts = [
        np.array(tokenizer.apply_chat_template(d, add_generation_prompt=True, return_dict=False), np.int32)
        for d in dialogues
    ]
    return [prompts[0][:1], *prompts]


def request(
    row: int, ids: Sequence[int] | np.ndarray, *, file: int = 0, samples: Sequence[int] = (0,), **params: Any
) -> Request:
    """A greedy request unless params say otherwise."""
    sampling = SamplingParams(**{"temperature": 0.0, "n": len(samples), **params})
    return Request(RowKey(file, row), np.asarray(ids, np.int32), sampling, samples=tuple(samples))


def make_engine(loaded: LoadedModel, *, seed: int = 0, num_topk: int = 0, **config: Any) -> Engine:
    """An engine with blocks of 16, so that short rows already have several."""
    settings = EngineConfig(**{"block_size": 16, "kv_cache_gb": 0.1, **config})
    return Engine(loaded, settings, seed=seed, logprobs=num_topk > 0, num_topk=num_topk)


def by_key(completions: Iterable[Completion]) -> dict[tuple[RowKey, int], Completion]:
    """Completions by row key and sample; each may come only once."""
    found: dict[tuple[RowKey, int], Completion] = {}
    for completion in completions:
        key = (completion.request.key, completion.sample)
        assert key not in found, f"{key} came twice"
        found[key] = completion
    return found


class PieceTokenizer:
    """Ids are pieces of bytes, some of them parts of a character; decodes as byte-level BPEs do."""

    def __init__(self, pieces: Sequence[bytes], eos_token_id: int | None = None) -> None:
        self.pieces = list(pieces)
        self.eos_token_id = eos_token_id

    def __len__(self) -> int:
        return len(self.pieces)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        special = self.eos_token_id if skip_special_tokens else None
        return b"".join(self.pieces[i] for i in ids if i != special).decode("utf-8", errors="replace")


def letter_tokenizer() -> PieceTokenizer:
    """128 pieces of a small alphabet, so that strings recur: letters, pairs, halves of é and €."""
    letters = [bytes([c]) for c in b"abcdefgh"]
    pairs = [a + b for a in letters for b in letters]
    halves = [b"\xc3", b"\xa9", b"\xe2\x82", b"\xac"]
    words = [b" " + p for p in pairs]
    return PieceTokenizer((letters + pairs + halves + words)[:VOCABULARY])


class FixedDraws(Draws):
    """Numbers of a test's own in place of random ones."""

    def __init__(self, uniform: np.ndarray) -> None:
        count = len(uniform)
        super().__init__(np.zeros((count, 2), np.uint32), np.zeros(count, np.int64))
        # Where the cached property looks first.
        vars(self)["uniform"] = uniform
