"""A family through the engine beside transformers' generate: 32 packed rows, everything forced at once.

Each family is run once per process, for the tests and for the README's table alike. Knows what was
generated and what the engine counted; refuses to judge.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from fakes import EOS_IDS, by_key, make_engine, random_model, request
from models.families import LONGEST_ROW, VOCABULARY, WINDOW, Family, family
from transformers import GenerationConfig

from pipeline.config import EngineMode, ModelConfig
from pipeline.engine import RowKey
from pipeline.engine.scheduler import SchedulerCounters
from pipeline.models.layers import layers_by_window
from pipeline.models.load import LoadedModel, inspect_model, wrap_model
from pipeline.models.self_check import check_architecture

NUM_ROWS = 32
# So small that the rows of one window already take turns with their memory.
BLOCK_SIZE = 4
BUDGET = 16
# Block and window borders are among them; the 72 is far past a window and an original range.
_LENGTHS = (1, 72, 3, 4, 5, 8, 16, 17, 15, 24, 25, 33, 2, 49)
# The 1 ends a row with its prefill.
_MAX_TOKENS = (7, 24, 1, 12, 4)

Rows = list[list[int]]


@dataclass(frozen=True)
class Reference:
    """What generate makes of each prompt, and by how much the chosen logit was above the second, at least."""

    prompts: list[np.ndarray]
    max_tokens: list[int]
    expected: Rows
    margin: float

    @property
    def lengths(self) -> list[int]:
        """Positions that each row computes: its last token is sampled and never read."""
        return [len(p) + len(e) - 1 for p, e in zip(self.prompts, self.expected, strict=True)]


@dataclass(frozen=True)
class FamilyRun:
    """got, counters: by mode. windows: sliding windows of the layers, as the model itself has them."""

    reference: Reference
    got: dict[EngineMode, Rows]
    counters: dict[EngineMode, SchedulerCounters]
    windows: frozenset[int]


@cache
def run_family(name: str) -> FamilyRun:
    """The whole comparison, the self-check first. Raises UnsupportedModel as loading does."""
    chosen = family(name)
    check_architecture(chosen.config(), chosen.max_model_len)
    reference, loaded = reference_of(name), load(chosen)
    done = {mode: engine_rows(loaded, reference, mode) for mode in EngineMode}
    return FamilyRun(
        reference,
        {mode: rows for mode, (rows, _) in done.items()},
        {mode: counters for mode, (_, counters) in done.items()},
        frozenset(window for window in layers_by_window(loaded) if window is not None),
    )


@cache
def refusal_of(name: str) -> str:
    """What is said of a folder with the family's configuration and no weights: '' if nothing is."""
    with tempfile.TemporaryDirectory() as folder:
        family(name).config().save_pretrained(folder)
        try:
            inspect_model(ModelConfig(path=folder))
        except ValueError as error:
            return str(error)
    return ""


def original_range(config: Any) -> int | None:
    """Positions that the RoPE was made for before it was stretched; None where it was not."""
    settings = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    ranges = (one.get("original_max_position_embeddings") for one in nested or [settings])
    return next((found for found in ranges if found), None)


def load(chosen: Family, **changes: Any) -> LoadedModel:
    """The family for the engine: a model of its own with the reference's weights."""
    return wrap_model(
        random_model(chosen.config(**changes), chosen.seed),
        generation_config=GenerationConfig(eos_token_id=list(EOS_IDS)),
        max_model_len=chosen.max_model_len,
    )


@cache
def reference_of(name: str) -> Reference:
    """By transformers itself: float32, eager attention, one prompt at a time."""
    chosen = family(name)
    longest = chosen.max_model_len or LONGEST_ROW
    prompts = _prompts(longest)
    max_tokens = [min(_MAX_TOKENS[i % len(_MAX_TOKENS)], longest - len(p)) for i, p in enumerate(prompts)]
    model = random_model(chosen.config(), chosen.seed)
    rows = [_generate(model, p, n) for p, n in zip(prompts, max_tokens, strict=True)]
    return Reference(prompts, max_tokens, [ids for ids, _ in rows], min(margin for _, margin in rows))


def engine_rows(
    loaded: LoadedModel, reference: Reference, mode: EngineMode
) -> tuple[Rows, SchedulerCounters]:
    """All prompts packed, in pieces, with shared beginnings, and memory for the longest row alone."""
    sliding = None not in layers_by_window(loaded)
    # A window that begins and ends inside a block, and the longest chunk behind it.
    seen = WINDOW - 1 + BUDGET + BLOCK_SIZE if sliding else LONGEST_ROW
    seen = min(seen, max(len(p) + n for p, n in zip(reference.prompts, reference.max_tokens, strict=True)))
    engine = make_engine(
        loaded,
        mode=mode,
        max_num_seqs=8,
        max_num_batched_tokens=BUDGET,
        block_size=BLOCK_SIZE,
        num_blocks=1 + -(-seen // BLOCK_SIZE),
        reserve=0.0,
    )
    requests = [
        request(row, ids, max_tokens=limit)
        for row, (ids, limit) in enumerate(zip(reference.prompts, reference.max_tokens, strict=True))
    ]
    found = by_key(engine.generate(requests))
    return [found[RowKey(0, row), 0].token_ids.tolist() for row in range(NUM_ROWS)], engine.stats.counters


def _prompts(longest: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = [*_LENGTHS, *rng.integers(1, 22, NUM_ROWS - len(_LENGTHS)).tolist()]
    lengths = [min(length, longest - 4) for length in lengths]
    prompts = [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]
    shared = rng.integers(0, VOCABULARY, 3 * BLOCK_SIZE + 1)
    for prompt in prompts[2::3]:
        count = min(len(prompt) - 1, len(shared))
        prompt[:count] = shared[:count]
    return prompts


def _generate(model: Any, ids: np.ndarray, max_new: int) -> tuple[list[int], float]:
    prompt = torch.from_numpy(ids.astype(np.int64))[None]
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_new,
        do_sample=False,
        eos_token_id=list(EOS_IDS),
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    return out.sequences[0, len(ids) :].tolist(), float((best[:, 0] - best[:, 1]).min())
