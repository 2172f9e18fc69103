"""The console script: verbs and tab completion."""

from __future__ import annotations

import os
import sys
import types

import pytest


@pytest.mark.parametrize("verb", [(), ("run",)])
def test_run_is_the_verb_when_none_is_given(command, verb):
    assert [job.seed for job in command(*verb, "seed=5").jobs] == [5]


@pytest.mark.parametrize("verb", ["status", "verify", "finalize"])
@pytest.mark.parametrize("code", [0, 1])
def test_other_verbs_get_the_rest_and_give_the_exit_code(command, monkeypatch, verb, code):
    given: list[list[str]] = []
    module = types.ModuleType(f"pipeline.{verb}")
    module.main = lambda arguments: given.append(arguments) or code
    monkeypatch.setitem(sys.modules, f"pipeline.{verb}", module)
    assert command(verb, "DIR", "--flag").code == code
    assert given == [["DIR", "--flag"]]


@pytest.mark.parametrize("verb", ["status", "verify", "finalize"])
def test_a_folder_without_a_job_is_named_in_one_line(command, verb):
    result = command(verb, "here")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("tokenmill: here") and result.err.count("\n") == 1


def complete(command, monkeypatch, line):
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    result = command("-sc", "query=bash")
    assert result.code == 0
    return result.out.split()


@pytest.mark.parametrize("head", ["tokenmill ", "tokenmill run "])
@pytest.mark.parametrize(
    ("word", "offered"),
    [
        ("model=t", ["model=tiny"]),
        ("sampling.temp", ["sampling.temperature="]),
        ("source=", [f"source={c}" for c in "arrow demo_prompts hf jsonl parquet ultrachat".split()]),
    ],
)
def test_tab_completion_offers_choices_and_keys(command, monkeypatch, head, word, offered):
    assert complete(command, monkeypatch, head + word) == offered


def test_tab_completion_installs_itself(command):
    result = command("-sc", "install=bash")
    assert result.code == 0
    assert "complete " in result.out and "tokenmill" in result.out


def test_no_engine_is_imported_to_complete_a_word(command, monkeypatch):
    loaded = set(sys.modules)
    complete(command, monkeypatch, "tokenmill conf=")
    assert not {name for name in set(sys.modules) - loaded if name.startswith(("torch", "transformers"))}
    assert os.environ["COMP_LINE"] == "tokenmill conf="
