"""Every family equals transformers' generate whatever is forced on it, or is refused with a reason.

The comparison itself is put to the test as well: it must notice a window that is off by one,
sinks, softcaps and scales that are dropped, and RoPE frequencies that are not the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import EOS_IDS
from models.families import FAMILIES, ORIGINAL_RANGE, REFUSED, RUN, WINDOW, family
from models.family_runs import (
    NUM_ROWS,
    engine_rows,
    load,
    original_range,
    reference_of,
    refusal_of,
    run_family,
)
from models.family_table import README, family_table, written_table

from pipeline.config import EngineMode
from pipeline.models import attention
from pipeline.models.architecture import UnsupportedModel
from pipeline.models.load import LoadedModel
from pipeline.models.self_check import check_architecture

# Logits this near to each other may change places by rounding alone: another seed is to be taken then.
TIE = 1e-4
RUNS_HERE = [one.name for one in RUN if one.runs_here]
TOO_NEW = [one.name for one in RUN if not one.runs_here]


@pytest.mark.parametrize("mode", EngineMode)
@pytest.mark.parametrize("name", RUNS_HERE)
def test_greedy_equals_generate(name: str, mode: EngineMode) -> None:
    run = run_family(name)
    for row, expected in enumerate(run.reference.expected):
        assert run.got[mode][row] == expected, f"row {row}"


@pytest.mark.parametrize("mode", EngineMode)
@pytest.mark.parametrize("name", RUNS_HERE)
def test_everything_was_forced(name: str, mode: EngineMode) -> None:
    fired = run_family(name).counters[mode]
    assert fired.num_partial_prefill_chunks > 5
    assert fired.num_shared_blocks > 5
    assert fired.num_preemptions > 0
    assert (fired.num_wasted_row_steps > 0) is (mode is EngineMode.async_)


@pytest.mark.parametrize("name", RUNS_HERE)
def test_the_rows_are_worth_comparing(name: str) -> None:
    run = run_family(name)
    reference, config = run.reference, family(name).config()
    assert reference.margin > TIE
    assert len(reference.expected) == NUM_ROWS
    # Greedy paths differ: from row to row, in their tokens, and in how they end.
    assert len({tuple(ids) for ids in reference.expected}) >= 28
    assert len({token for ids in reference.expected for token in ids}) >= 25
    assert 3 <= sum(ids[-1] in EOS_IDS for ids in reference.expected) <= 20
    assert len({len(ids) for ids in reference.prompts}) > 10
    assert max(reference.lengths) > 20
    assert run.windows == ({WINDOW} if has_window(config) else set())
    if family(name).max_model_len is None:
        longest = max(reference.lengths)
        assert longest > 4 * WINDOW and longest > 2 * ORIGINAL_RANGE
        assert min(reference.lengths) < 8
    else:
        assert max(reference.lengths) <= ORIGINAL_RANGE


def has_window(config: Any) -> bool:
    types = getattr(config, "layer_types", None)
    slides = getattr(config, "sliding_window", None) is not None
    return slides if types is None else "sliding_attention" in types


def test_the_list_covers_what_families_have() -> None:
    """Windows everywhere and in turn, a stretched RoPE, sinks, a softcap: none may fall out unnoticed."""
    windows = {name: run_family(name).windows for name in RUNS_HERE}
    sliding = {name for name, found in windows.items() if found}
    assert sliding == {
        "Mistral", "Gemma 2", "Gemma 3, text", "Phi-3", "GPT-OSS", "OLMo 3", "StarCoder2", "Cohere 2",
        "EXAONE 4",
    }  # fmt: skip
    stretched = {one.name for one in RUN if original_range(one.config()) and one.max_model_len is None}
    assert stretched == {"Llama, llama3 RoPE", "Llama, YaRN", "GPT-OSS", "OLMo 3"}
    assert len({one.name for one in FAMILIES}) == len(FAMILIES)


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("name", [one.name for one in REFUSED])
def test_refused_with_key_reason_and_way_out(name: str) -> None:
    """The folder has no weights: whatever is said is said before any is looked for."""
    said = refusal_of(name)
    assert said.startswith("model.path: ") and "\n" not in said
    assert [word for word in (family(name).kind, *family(name).refusal) if word not in said] == []


@pytest.mark.parametrize("name", TOO_NEW)
def test_refused_where_transformers_is_too_old(name: str) -> None:
    assert "engine=transformers may run it" in refusal_of(name)


@pytest.mark.parametrize(
    "name", ["Phi-3, long RoPE past its original range", "Llama, dynamic RoPE past its original range"]
)
def test_the_way_out_leads_out(name: str) -> None:
    config = family(name).config()
    with pytest.raises(UnsupportedModel):
        check_architecture(config, ORIGINAL_RANGE + 1)
    check_architecture(config, ORIGINAL_RANGE)


# ---------------------------------------------------------------- the comparison can fail


def reload(**changes: Any) -> Callable[[str], LoadedModel]:
    """The same weights under another configuration."""
    return lambda name: load(family(name), **changes)


def without_sinks(name: str) -> LoadedModel:
    loaded = load(family(name))
    for layer in loaded.model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e9)
    return loaded


def other_rope(**changes: Any) -> Callable[[str], LoadedModel]:
    """Other settings wherever the RoPE is stretched."""

    def wrong(name: str) -> LoadedModel:
        settings = family(name).config().rope_parameters
        nested = any(isinstance(value, dict) for value in settings.values())
        whole = {"": settings} if not nested else settings
        changed = {
            key: {**value, **changes} if "factor" in value else value
            for key, value in whole.items()
            if isinstance(value, dict)
        }
        return load(family(name), rope_parameters=changed if nested else changed[""])

    return wrong


# What goes wrong, in which family, and how long a row may be without noticing.
WRONG: list[tuple[str, str, Callable[[str], LoadedModel], int]] = [
    ("window one too wide", "Mistral", reload(sliding_window=WINDOW + 1), WINDOW),
    ("window one too narrow", "Mistral", reload(sliding_window=WINDOW - 1), WINDOW - 1),
    ("window one too wide", "Gemma 2", reload(sliding_window=WINDOW + 1), WINDOW),
    ("window one too wide", "GPT-OSS", reload(sliding_window=WINDOW + 1), WINDOW),
    ("no window at all", "Phi-3", reload(sliding_window=None), WINDOW),
    (
        "windows in the wrong layers",
        "Gemma 3, text",
        reload(layer_types=["full_attention", "sliding_attention"] * 2),
        0,
    ),
    ("no sinks", "GPT-OSS", without_sinks, 0),
    ("no softcap of attention", "Gemma 2", reload(attn_logit_softcapping=None), 0),
    ("another scale", "Granite", reload(attention_multiplier=0.4), 0),
    ("plain RoPE", "Llama, YaRN", reload(rope_parameters={"rope_type": "default", "rope_theta": 1e4}), 0),
    ("another factor", "Llama, llama3 RoPE", other_rope(factor=3.0), 0),
    ("another factor", "OLMo 3", other_rope(factor=3.0), 0),
    ("RoPE in all layers", "SmolLM3", reload(no_rope_layers=[1, 1]), 0),
    ("one expert a token", "Mixtral", reload(num_experts_per_tok=1), 0),
]


@pytest.mark.parametrize(
    ("name", "wrong", "unharmed"), [case[1:] for case in WRONG], ids=[f"{c[1]}-{c[0]}" for c in WRONG]
)
def test_the_comparison_notices(name: str, wrong: Callable[[str], LoadedModel], unharmed: int) -> None:
    reference = reference_of(name)
    got, _ = engine_rows(wrong(name), reference, EngineMode.sync)
    differing = [row for row in range(NUM_ROWS) if got[row] != reference.expected[row]]
    assert differing
    # Rows as short as that could not tell, so that it is the change above that the others tell of.
    assert min(reference.lengths[row] for row in differing) > unharmed


@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "GPT-OSS", "OLMo 3", "SmolLM3", "Granite"])
def test_an_unchanged_model_passes_the_same_way(name: str) -> None:
    reference = reference_of(name)
    assert engine_rows(load(family(name)), reference, EngineMode.sync)[0] == reference.expected


def test_the_comparison_notices_the_engines_own_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys one position too far, in the operator that writes them."""
    reference, loaded = reference_of("Llama"), load(family("Llama"))
    right = attention.paged_attention

    def shifted(query: torch.Tensor, new_keys: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(query, new_keys.roll(1, 0), *rest)

    monkeypatch.setattr(attention, "paged_attention", shifted)
    assert engine_rows(loaded, reference, EngineMode.sync)[0] != reference.expected


# ---------------------------------------------------------------- beyond the list


def test_a_mask_that_depends_on_the_content_is_refused() -> None:
    """Doge's forget gates add to the scores; trained weights change them, and so must the doll's."""
    with pytest.raises(UnsupportedModel, match="doge"):
        check_architecture(replace(family("Llama"), kind="doge").config())


# ---------------------------------------------------------------- the README


@pytest.mark.skipif(bool(TOO_NEW), reason="the table is made with the newest transformers")
def test_the_readmes_table_is_what_the_tests_found() -> None:
    """`python tests/models/family_table.py --write` renews it."""
    assert written_table(README.read_text()) == family_table()
