"""Fingerprints: what may change between two starts of a job, and how a refusal reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from pipeline import config as settings
from pipeline.config import JobConfig, ModelConfig, OutputConfig, ParquetSource, PromptConfig
from pipeline.output.fingerprint import (
    NEUTRAL,
    difference,
    digest,
    fingerprint,
    flatten,
    is_neutral,
    refuse_difference,
)


def job(**changes: object) -> JobConfig:
    made = JobConfig(
        source=ParquetSource(path=["a", "b"], storage_options={"secret": "hush"}),
        prompt=PromptConfig(column="text"),
        model=ModelConfig(path="m"),
        output=OutputConfig(dir="out"),
    )
    for key, value in changes.items():
        target: object = made
        *rooms, name = key.split("__")
        for room in rooms:
            target = getattr(target, room)
        setattr(target, name, value)
    return made


def prints(**changes: object) -> dict[str, object]:
    return fingerprint(job(**changes), {"sampling.temperature": 0.7, "version": "1"})


@pytest.mark.parametrize(
    "change",
    [
        {"report__interval_s": 1.0},
        {"cost__gpu_hour_usd": 9.0},
        {"output__dir": "elsewhere"},
        {"output__commit_interval_s": 1.0},
        {"output__retry_errors": True},
        {"engine__max_num_seqs": 3},
        {"source__unit_rows": 3},
        {"source__storage_options": {"secret": "new"}},
    ],
)
def test_keys_that_cannot_change_the_output_may_change(change):
    assert prints(**change) == prints()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"seed": 1}, "seed: 0 → 1"),
        ({"prompt__system": "Be kind."}, "prompt.system: null → Be kind."),
        ({"source__path": ["a"]}, 'source.path: ["a", "b"] → ["a"]'),
        ({"output__topk_dtype": settings.TopkDtype.float32}, "output.topk_dtype: float16 → float32"),
        ({"source__limit": 5}, "source.limit: null → 5"),
    ],
)
def test_other_keys_are_told_old_and_new(change, line):
    assert difference(prints(), prints(**change)) == [line]


def test_what_was_resolved_wins_over_what_was_left_open():
    assert prints()["sampling.temperature"] == 0.7
    changed = fingerprint(job(), {"sampling.temperature": 0.8, "version": "1"})
    assert difference(prints(), changed) == ["sampling.temperature: 0.7 → 0.8"]


def test_a_key_that_only_one_side_has_is_a_difference():
    assert difference({"a": 1}, {"a": 1, "b": 2}) == ["b: (absent) → 2"]
    assert difference({"b": None}, {}) == ["b: null → (absent)"]


def test_the_difference_of_long_values_is_in_sight():
    (line,) = difference({"t": "x" * 500 + "OLD" + "y" * 500}, {"t": "x" * 500 + "NEW" + "y" * 500})
    assert "OLD" in line and "NEW" in line and len(line) < 200
    (line,) = difference({"t": "x" * 500}, {"t": "x" * 500 + "MORE"})
    assert "MORE" in line


def test_the_refusal_lists_all_and_tells_the_remedy():
    with pytest.raises(
        ValueError, match="out holds another job: a: 1 → 2; b: 1 → 3. Restore these values.*output.dir"
    ):
        refuse_difference(Path("out"), {"a": 1, "b": 1}, {"a": 2, "b": 3})
    refuse_difference(Path("out"), {"a": 1}, {"a": 1})


def test_a_stored_fingerprint_equals_a_fresh_one():
    fresh = fingerprint(job(), {"model.path": Path("m"), "n": (1, 2)})
    stored = json.loads(json.dumps(fresh))
    assert difference(stored, fresh) == [] and digest(stored) == digest(fresh)


def test_no_secret_is_kept():
    assert "hush" not in json.dumps(prints())


def test_every_neutral_name_is_a_key_that_exists():
    known = set(flatten(dataclasses.asdict(job()))) | {"source.streaming"}
    for name in NEUTRAL:
        assert any(is_neutral(key) and key.startswith(name) for key in known), name
