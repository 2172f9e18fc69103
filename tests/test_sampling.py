"""Which sampling values apply, where each came from, and what a row's own values make of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fakes import (
    EOS_IDS,
    SHIPPED,
    by_key,
    family_config,
    make_engine,
    mixed_prompts,
    random_model,
    request,
    shipped_tokenizer,
)
from prompt_fakes import FakeRow
from transformers import GenerationConfig

import pipeline
from pipeline.config import (
    EngineConfig,
    JobConfig,
    ModelConfig,
    OutputConfig,
    ParquetSource,
    PromptConfig,
    SamplingConfig,
    SamplingDefaults,
)
from pipeline.engine import RowKey
from pipeline.job import run_job
from pipeline.models.load import wrap_model
from pipeline.request import SamplingParams
from pipeline.sampling import RowSampling, resolve_sampling

END, USER = map(shipped_tokenizer().convert_tokens_to_ids, ("<|end|>", "<|user|>"))
NO_BIAS = float("-inf")


def resolve(
    own: dict[str, Any] | None = None, eos_ids: tuple[int, ...] = (END,), **sampling: Any
) -> tuple[SamplingParams, dict[str, tuple[Any, str]]]:
    """own: values of the model's generation configuration; None if it brings none."""
    config = JobConfig(
        source=ParquetSource(path="in.parquet"),
        prompt=PromptConfig(column="q"),
        model=ModelConfig(path="m"),
        output=OutputConfig(dir="out"),
        sampling=SamplingConfig(**sampling),
    )
    generation = None if own is None else GenerationConfig(**own)
    params, resolved = resolve_sampling(config, generation, shipped_tokenizer(), eos_ids)
    return params, {one.key: (one.value, one.origin) for one in resolved}


MODELS_OWN = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}


def test_the_models_own_values_are_the_defaults() -> None:
    params, said = resolve(MODELS_OWN)
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.95)
    assert (params.min_p, params.repetition_penalty) == (0.05, 1.05)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert said[f"sampling.{name}"] == (MODELS_OWN[name], "the model's generation_config")


def test_defaults_none_takes_nothing_from_the_model() -> None:
    params, said = resolve(
        {**MODELS_OWN, "suppress_tokens": [7], "bad_words_ids": [[8]]}, defaults=SamplingDefaults.none
    )
    assert params == SamplingParams()
    assert said["sampling.temperature"] == (1.0, "the neutral value")
    assert "sampling.bad_words" not in said and "sampling.logit_bias" not in said


def test_a_model_without_a_generation_configuration_is_neutral() -> None:
    assert resolve(None)[0] == SamplingParams()


def test_the_jobs_values_win() -> None:
    params, said = resolve(MODELS_OWN, temperature=0.9, top_k=5, repetition_penalty=1.0)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.9, 5, 1.0)
    assert params.top_p == 0.95
    assert said["sampling.top_k"] == (5, "the job's configuration")
    assert said["sampling.top_p"] == (0.95, "the model's generation_config")


@pytest.mark.parametrize("own", [{"do_sample": False}, {}, {"do_sample": False, "temperature": 0.7}], ids=str)
def test_a_model_that_does_not_sample_is_greedy(own: dict[str, Any]) -> None:
    params, said = resolve(own)
    assert params.temperature == 0.0
    assert said["sampling.temperature"] == (0.0, "the model's generation_config: do_sample is false")
    assert resolve(own, temperature=0.8)[0].temperature == 0.8


def test_a_top_k_of_0_is_none() -> None:
    params, said = resolve({"do_sample": True, "top_k": 0})
    assert params.top_k is None and said["sampling.top_k"] == (None, "the neutral value")


UNSUPPORTED: dict[str, Any] = {
    "num_beams": 4,
    "no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.2,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.001,
    "eta_cutoff": 0.001,
    "penalty_alpha": 0.6,
    "exponential_decay_length_penalty": (15, 1.6),
    "sequence_bias": [[[5, 6], -2.0]],
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 3,
    "begin_suppress_tokens": [3],
    "guidance_scale": 1.5,
    "min_length": 9,
    "min_new_tokens": 9,
    "stop_strings": ["END"],
    "dola_layers": "high",
    "token_healing": True,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_engine_lacks_is_refused_by_name(name: str) -> None:
    own = {"do_sample": True, name: UNSUPPORTED[name]}
    with pytest.raises(ValueError) as caught:
        resolve(own)
    said = str(caught.value)
    assert f"sets {name}=" in said and "sampling.defaults=none" in said
    # The way out leads out.
    assert resolve(own, defaults=SamplingDefaults.none)[0] == SamplingParams()


@pytest.mark.parametrize(
    "own",
    [
        {"num_beams": 1},
        {"typical_p": 1.0},
        {"no_repeat_ngram_size": 0},
        {"min_length": 0},
        {"token_healing": False},
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_not_refused(own: dict[str, Any]) -> None:
    assert resolve({"do_sample": True, **own})[0] == SamplingParams()


# ---------------------------------------------------------------- stops


def test_several_stop_ids_are_shown_together() -> None:
    params, said = resolve(MODELS_OWN, eos_ids=(END, 29, 64), stop_token_ids=[7, 29])
    assert params.stop_token_ids == (7, 29)
    value, origin = said["sampling.stop_token_ids"]
    assert value == [1, 7, 29, 64]
    assert "generation_config" in origin and "tokenizer" in origin and "the job's" in origin


def test_ignore_eos_leaves_the_jobs_own_stop_ids() -> None:
    params, said = resolve(MODELS_OWN, eos_ids=(END, 29), stop_token_ids=[7], ignore_eos=True)
    assert params.ignore_eos and params.stop_token_ids == (7,)
    assert said["sampling.stop_token_ids"] == ([7], "the job's configuration")


def test_stop_strings_that_are_special_tokens_become_stop_ids() -> None:
    """They never show in the text, where a string would be looked for."""
    params, said = resolve(stop=["<|user|>", "END", "<|end|>"], stop_token_ids=[9], eos_ids=(END,))
    assert params.stop == ("END",)
    assert params.stop_token_ids == (9, USER, END)
    assert said["sampling.stop_token_ids"][0] == sorted([9, USER, END])


@pytest.mark.parametrize("bad", [-1, 1024, 10**9])
def test_stop_ids_that_are_no_tokens_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=rf"sampling\.stop_token_ids=\[5, {bad}\].*0 to 1023"):
        resolve(stop_token_ids=[5, bad])


# ---------------------------------------------------------------- bias and words


def test_suppressed_tokens_of_the_model_join_the_jobs_bias() -> None:
    params, said = resolve({"suppress_tokens": [7, 9]}, logit_bias={"15": -2.5, 3: 1})
    assert params.logit_bias == ((3, 1.0), (15, -2.5), (7, NO_BIAS), (9, NO_BIAS))
    assert said["sampling.logit_bias"][0] == {"3": "1.0", "15": "-2.5", "7": "-inf", "9": "-inf"}


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        ({"hello": 1}, "no mapping of token ids to numbers"),
        ({4: "much"}, "no mapping of token ids to numbers"),
        ([4, 5], "is no mapping"),
        ({-1: 1.0}, "0 to 1023"),
        ({1024: 1.0}, "0 to 1023"),
        ({4: float("nan")}, "finite"),
        ({4: float("inf")}, "finite"),
    ],
    ids=str,
)
def test_a_bias_that_cannot_be_is_refused(bias: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r"sampling\.logit_bias=") as caught:
        resolve(logit_bias=bias)
    assert words in str(caught.value)


def test_bad_words_are_forbidden_with_and_without_a_space_before_them() -> None:
    encode = shipped_tokenizer().encode
    params, said = resolve({"bad_words_ids": [[5], [6, 7]]}, bad_words=["cat", " two words "])
    assert params.bad_words_ids == (
        tuple(encode("cat")),
        tuple(encode(" cat")),
        tuple(encode("two words ")),
        tuple(encode(" two words ")),
        (5,),
        (6, 7),
    )
    assert said["sampling.bad_words"][0] == [list(word) for word in params.bad_words_ids]
    assert resolve(bad_words=["cat", " cat", "cat"])[0].bad_words_ids == params.bad_words_ids[:2]


@pytest.mark.parametrize("word", ["", " ", "\n"])
def test_an_empty_bad_word_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"sampling\.bad_words=.*empty word: remove it"):
        resolve(bad_words=["cat", word])


# ---------------------------------------------------------------- single rows

JOB = SamplingParams(temperature=0.5, max_tokens=32, stop=("END",), stop_token_ids=(9,), n=2, logprobs=True)


def of_row(value: Any, params: SamplingParams = JOB) -> SamplingParams:
    row: Any = FakeRow({"how": value})
    return RowSampling("how", params, shipped_tokenizer(), ["q", "how"])(row)


def changed(**values: Any) -> SamplingParams:
    return replace(JOB, **values)


STRUCTS: list[tuple[dict[str, Any], SamplingParams]] = [
    ({"temperature": 0, "max_tokens": 5}, changed(temperature=0, max_tokens=5)),
    ({"top_k": 3, "top_p": 0.5, "min_p": 0.1}, changed(top_k=3, top_p=0.5, min_p=0.1)),
    ({"stop": "X"}, changed(stop=("X",))),
    ({"stop": ["X", "<|user|>"]}, changed(stop=("X",), stop_token_ids=(9, USER))),
    ({"stop": [], "stop_token_ids": [4]}, changed(stop=(), stop_token_ids=(4,))),
    ({"stop_token_ids": []}, changed(stop_token_ids=())),
    ({"logit_bias": {"4": -1, "5": None}}, changed(logit_bias=((4, -1.0),))),
    (
        {"repetition_penalty": 1.2, "presence_penalty": -1, "frequency_penalty": 0.5},
        changed(repetition_penalty=1.2, presence_penalty=-1, frequency_penalty=0.5),
    ),
    ({"ignore_eos": True, "min_tokens": 2}, changed(ignore_eos=True, min_tokens=2)),
    # So whole numbers come out of columns in which some rows have none.
    ({"max_tokens": 7.0, "top_k": 4.0, "temperature": None}, changed(max_tokens=7, top_k=4)),
]


@pytest.mark.parametrize(("value", "expected"), STRUCTS, ids=[str(value) for value, _ in STRUCTS])
@pytest.mark.parametrize("form", [lambda value: value, json.dumps], ids=["struct", "JSON"])
def test_a_rows_values(form: Any, value: dict[str, Any], expected: SamplingParams) -> None:
    got = of_row(form(value))
    assert got == expected
    assert all(type(getattr(got, name)) is int for name in ("max_tokens", "min_tokens"))


def test_a_rows_bad_words() -> None:
    encode = shipped_tokenizer().encode
    expected = (tuple(encode("cat")), tuple(encode(" cat")))
    assert of_row({"bad_words": ["cat"]}).bad_words_ids == expected
    assert of_row('{"bad_words": "cat"}').bad_words_ids == expected


@pytest.mark.parametrize("value", [None, "", " ", "null", "{}", {}, {"top_k": None}], ids=str)
def test_a_row_without_values_has_the_jobs(value: Any) -> None:
    assert of_row(value) == JOB


def test_rows_of_one_kind_share_one_object() -> None:
    rows = RowSampling("how", JOB, shipped_tokenizer(), ["how"])

    def params(value: Any) -> SamplingParams:
        row: Any = FakeRow({"how": value})
        return rows(row)

    assert params(None) is JOB
    assert params({"top_k": 3, "min_p": 0.1}) is params('{"min_p": 0.1, "top_k": 3}')


WRONG_ROWS: list[tuple[Any, str]] = [
    ({"temprature": 1}, "sets temprature; a row may set bad_words, "),
    ({"n": 3}, "sets n; a row may set"),
    ({"logprobs": True, "top_logprobs": 4}, "sets logprobs, top_logprobs; a row may set"),
    ({"temperature": -1}, "sampling.temperature=-1"),
    ({"temperature": "hot"}, "sampling.temperature='hot'"),
    ({"temperature": True}, "sampling.temperature=True"),
    ({"presence_penalty": float("nan")}, "sampling.presence_penalty=nan"),
    ({"max_tokens": 2.5}, "sampling.max_tokens=2.5"),
    ({"max_tokens": "9"}, "sampling.max_tokens='9'"),
    ({"max_tokens": 0}, "sampling.max_tokens=0"),
    ({"max_tokens": float("inf")}, "sampling.max_tokens=inf"),
    ({"min_tokens": 33}, "sampling.min_tokens=33"),
    ({"top_k": 10**12}, "sampling.top_k=1000000000000"),
    ({"top_k": 0}, "sampling.top_k=0"),
    ({"top_p": 0}, "sampling.top_p=0"),
    ({"ignore_eos": "no"}, "sampling.ignore_eos='no'"),
    ({"stop": [5]}, "sampling.stop=[5]"),
    ({"stop": [""]}, "empty stop string"),
    ({"stop": 5}, "values that do not work"),
    ({"stop_token_ids": [5000]}, "sampling.stop_token_ids=[5000]"),
    ({"stop_token_ids": [-3]}, "sampling.stop_token_ids=[-3]"),
    ({"stop_token_ids": ["a"]}, "sampling.stop_token_ids='a'"),
    ({"stop_token_ids": 5}, "values that do not work"),
    ({"logit_bias": {"4": "x"}}, "sampling.logit_bias="),
    ({"logit_bias": {"5000": 1}}, "sampling.logit_bias=[5000]"),
    ({"logit_bias": 3}, "values that do not work"),
    ({"bad_words": [""]}, "empty word"),
    ({"bad_words": [3]}, "sampling.bad_words=[3]"),
    ("{nope", "is no JSON"),
    ("[1, 2]", "no object of keys and values"),
    ("7", "no object of keys and values"),
    (3.5, "no object of keys and values"),
]


@pytest.mark.parametrize(("value", "words"), WRONG_ROWS, ids=[str(value) for value, _ in WRONG_ROWS])
def test_a_rows_wrong_values_name_column_and_value(value: Any, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        of_row(value)
    assert "sampling.column=how" in str(caught.value) and words in str(caught.value)


def test_a_column_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sampling\.column=how is not in the input: it has q, tags"):
        RowSampling("how", JOB, shipped_tokenizer(), ["q", "tags"])


# ---------------------------------------------------------------- whole jobs


def run(folder: Path, column: pa.Array, **sampling: Any) -> list[dict[str, Any]]:
    """A row of input for each value of the column; the shipped model, greedy; rows in order."""
    folder.mkdir()
    questions = [f"What is {row} + 5?" for row in range(len(column))]
    pq.write_table(pa.table({"q": questions, "how": column}), folder / "in.parquet")
    config = JobConfig(
        source=ParquetSource(path=str(folder / "in.parquet")),
        prompt=PromptConfig(column="q"),
        model=ModelConfig(path=str(SHIPPED)),
        engine=EngineConfig(max_num_seqs=8),
        sampling=SamplingConfig(column="how", max_tokens=24, **sampling),
        output=OutputConfig(dir=str(folder / "out"), columns=[], completion_ids=True),
    )
    assert run_job(config).exit_code == 0
    rows = pipeline.open_parts(str(folder / "out")).to_table().to_pylist()
    return sorted(rows, key=lambda row: row["row"])


COLUMNS: dict[str, pa.Array] = {
    # Missing keys are nulls in a struct, and so whole numbers are floats.
    "struct": pa.array(
        [
            None,
            {"max_tokens": 2.0, "ignore_eos": True},
            {"max_tokens": 2.5},
            {"bad_words": ["5"], "temperature": 0.0},
            {"max_tokens": 9.0, "bad_words": []},
            {"temperature": -3.0},
        ],
        pa.struct(
            {
                "max_tokens": pa.float64(),
                "temperature": pa.float64(),
                "ignore_eos": pa.bool_(),
                "bad_words": pa.list_(pa.string()),
            }
        ),
    ),
    "JSON": pa.array(
        [
            "",
            '{"max_tokens": 2, "ignore_eos": true}',
            '{"max_tokens": "two"}',
            '{"bad_words": ["5"]}',
            '{"max_tokens": 9}',
            '{"temprature": 3}',
        ]
    ),
}


@pytest.mark.parametrize("form", COLUMNS)
def test_a_wrong_row_is_an_error_and_the_others_go_on(tmp_path: Path, form: str) -> None:
    plain, rows = run(tmp_path / "plain", pa.nulls(6, pa.string())), run(tmp_path / form, COLUMNS[form])
    assert [row["finish_reason"] for row in rows] == ["stop", "length", "error", "stop", "stop", "error"]
    for wrong in (rows[2], rows[5]):
        assert wrong["error"]["code"] == "sampling_invalid" and wrong["completion"] in (None, "")
        assert "sampling.column=how" in wrong["error"]["message"]
    for same in (0, 4):
        assert rows[same]["completion_ids"] == plain[same]["completion_ids"]
    assert len(rows[1]["completion_ids"]) == 2
    five = {shipped_tokenizer().encode("5")[0], shipped_tokenizer().encode(" 5")[-1]}
    assert five & set(plain[3]["completion_ids"]) and not five & set(rows[3]["completion_ids"])


# ---------------------------------------------------------------- padding of the vocabulary


class OfHundred:
    """A tokenizer of 100 ids: whatever a model of 128 has above them is padding."""

    eos_token_id = None

    def __len__(self) -> int:
        return 100

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_of_the_vocabulary_is_never_sampled(temperature: float) -> None:
    model = random_model(family_config("llama"))
    # The padding is what the model would say before anything else.
    model.lm_head.weight[100:] *= 8
    prompts = mixed_prompts(12)
    plain = torch.stack([model(torch.from_numpy(p.astype(np.int64))[None]).logits[0, -1] for p in prompts])
    assert int((plain.argmax(-1) >= 100).sum()) > 8

    loaded = wrap_model(
        model, tokenizer=OfHundred(), generation_config=GenerationConfig(eos_token_id=list(EOS_IDS))
    )
    assert loaded.vocab_size == 100
    engine = make_engine(loaded, num_topk=100)
    knobs: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 0.5, "frequency_penalty": -1.0},
        {"logit_bias": ((120, 50.0), (5, 1.0))},
        {"top_k": 3, "top_p": 0.9},
    ]
    asked = [
        request(row, p, max_tokens=20, top_logprobs=100, **{"temperature": temperature, **knobs[row % 4]})
        for row, p in enumerate(prompts)
    ]
    found = by_key(engine.generate(asked))
    for row in range(len(prompts)):
        completion = found[RowKey(0, row), 0]
        assert completion.topk_ids is not None and completion.topk_logprobs is not None
        assert int(completion.token_ids.max()) < 100 and int(completion.topk_ids.max()) < 100
        # The hundred that are left have all the probability.
        np.testing.assert_allclose(np.exp(completion.topk_logprobs).sum(axis=1), 1.0, atol=1e-5)
        first = plain[row, :100].log_softmax(-1)
        assert completion.logprobs is not None
        np.testing.assert_allclose(completion.logprobs[0], first[completion.token_ids[0]], atol=1e-4)
