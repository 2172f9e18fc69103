"""The whole flow on the shipped model, through the command line: what is read, asked and written."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from real_jobs import OWN_JOB, TINY_MODEL, CommandServer, Ended, questions, write_questions
from transformers import AutoModelForCausalLM, AutoTokenizer

import pipeline
from pipeline import prepare
from pipeline.config import Determinism, EngineConfig, JobConfig

NUM_ROWS = 60
STOP = 1


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows in every kind of input."""
    path = tmp_path_factory.mktemp("flow")
    write_questions(path / "q.parquet", NUM_ROWS, row_group_size=16)
    rows = questions(NUM_ROWS)
    (path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path / "q.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=16)
    datasets.Dataset.from_list(rows).save_to_disk(path / "q_saved")
    return path


INPUTS = {
    "parquet": ("source=parquet", "source.path=q.parquet"),
    "jsonl": ("source=jsonl", "source.path=q.jsonl", "+source.schema.kind=int64"),
    "arrow": ("source=arrow", "source.path=q.arrow"),
    "saved": ("source=hf", "source.path=q_saved"),
}
DISTILL = (
    "prompt.column=question",
    "output=distill",
    "output.topk=3",
    "output.topk_dtype=float32",
    "sampling.defaults=none",
    "sampling.n=4",
    "sampling.max_tokens=24",
    "source.skip=5",
    "source.limit=40",
    "source.shuffle=true",
    'source.filter="kind != 0"',
    "source.unit_rows=7",
)


def run(commands: CommandServer, folder: Path, name: str, *arguments: str) -> Ended:
    ended = commands.run(*OWN_JOB, f"output.dir={name}", *arguments, cwd=folder)
    assert ended.code == 0, ended.err
    return ended


def finalized(commands: CommandServer, folder: Path, name: str) -> pa.Table:
    """The dataset of a job, proved complete, which all ways of opening it agree on."""
    for verb, arguments in (("verify", ()), ("finalize", ("--format", "both")), ("verify", ())):
        ended = commands.run(name, *arguments, cwd=folder, verb=verb)
        assert ended.code == 0, ended.out + ended.err
    assert "finalised dataset equal" in ended.out
    path = folder / name / "dataset"
    table = datasets.load_from_disk(path).with_format("arrow")[:]
    parquet = pq.ParquetDataset(sorted((path / "parquet").glob("*.parquet"))).read()
    parts = pipeline.open_parts(folder / name).to_table()
    assert parquet.column_names == table.column_names == parts.column_names
    by_key = [("file", "ascending"), ("row", "ascending"), ("sample", "ascending")]
    assert table.sort_by(by_key).to_pylist() == parts.sort_by(by_key).to_pylist()
    assert table.to_pylist() == parquet.to_pylist()
    return table


def keyed(table: pa.Table) -> dict[tuple[int, int], dict[str, Any]]:
    rows = {(row["row"], row["sample"]): row for row in table.to_pylist()}
    assert len(rows) == table.num_rows
    return rows


@pytest.fixture(scope="module", params=INPUTS)
def distilled(
    request: pytest.FixtureRequest, commands: CommandServer, folder: Path
) -> Iterator[tuple[str, pa.Table]]:
    name = f"out_{request.param}"
    run(commands, folder, name, *INPUTS[request.param], *DISTILL)
    yield request.param, finalized(commands, folder, name)


def test_each_row_ends_as_n_samples_in_one_order(distilled):
    _, table = distilled
    places = list(zip(table["row"].to_pylist(), table["sample"].to_pylist(), strict=True))
    rows = [row for row, sample in places if sample == 0]
    assert places == [(row, sample) for row in rows for sample in range(4)]
    assert sorted(rows) == list(range(5, 45)) != rows
    assert set(table["file"].to_pylist()) == {0}


def test_input_columns_are_carried_and_filtered_rows_are_skipped(distilled):
    kind, table = distilled
    given = questions(NUM_ROWS)
    for row in table.to_pylist():
        expected = given[row["row"]]
        assert row["question"] == expected["question"] and row["kind"] == expected["kind"]
        tags = expected["tags"]
        assert row["tags"] == (json.dumps(tags) if kind == "jsonl" and tags else tags)
        skipped = expected["kind"] == 0
        assert (row["finish_reason"] == "skipped") == skipped
        assert (row["completion"] is None) == (row["completion_ids"] is None) == skipped
        assert row["error"] is None


def test_tokens_and_text_agree_and_the_stop_token_is_kept(distilled, tokenizer):
    _, table = distilled
    reasons = set()
    for row in table.to_pylist():
        reasons.add(row["finish_reason"])
        if row["finish_reason"] == "skipped":
            continue
        ids, stopped = row["completion_ids"], row["finish_reason"] == "stop"
        assert (ids[-1] == STOP) == stopped and STOP not in ids[:-1]
        assert stopped or len(ids) == 24
        assert len(ids) == row["completion_tokens"]
        assert row["completion"] == tokenizer.decode(ids[:-1] if stopped else ids)
        chat = [{"role": "user", "content": row["question"]}]
        assert row["prompt"] == tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        assert row["prompt_ids"] == tokenizer.encode(row["prompt"], add_special_tokens=False)
        assert row["prompt_tokens"] == len(row["prompt_ids"])
    assert reasons == {"stop", "length", "skipped"}


def test_logprobs_are_those_of_the_model(distilled, model):
    _, table = distilled
    samples = [row for row in table.to_pylist() if row["finish_reason"] != "skipped"]
    for row in samples:
        topk = np.array(row["topk_logprobs"])
        assert topk.shape == (row["completion_tokens"], 3)
        total = np.exp(topk).sum(axis=1) + np.array(row["tail_mass"])
        assert np.abs(total - 1).max() < 1e-5
    for row in samples[::17]:
        ids = row["prompt_ids"] + row["completion_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, row["prompt_tokens"] - 1 : -1]
        expected = torch.log_softmax(logits.double(), dim=-1)
        chosen = expected.gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0]
        assert np.allclose(row["logprobs"], chosen, atol=1e-4)
        assert np.allclose(row["topk_logprobs"], expected.topk(3).values, atol=1e-4)
        assert np.allclose(expected.gather(1, torch.tensor(row["topk_ids"])), row["topk_logprobs"], atol=1e-4)


def test_samples_differ_and_the_kind_of_input_does_not_matter(commands, folder, distilled):
    _, table = distilled
    rows = keyed(table)
    first = pipeline.open_parts(folder / "out_parquet").to_table()
    assert {key: row["completion_ids"] for key, row in keyed(first).items()} == {
        key: row["completion_ids"] for key, row in rows.items()
    }
    # one prompt, ten rows of four samples
    stories = [row["completion"] for row in rows.values() if row["question"] == "Tell a story."]
    assert len(stories) == 40 and len(set(stories)) > 35


def test_greedy_equals_generate(commands, folder, tokenizer, model):
    run(commands, folder, "greedy", *INPUTS["parquet"], "prompt.column=question", "sampling=greedy",
        "sampling.max_tokens=30", "source.limit=24", "output.completion_ids=true")  # fmt: skip
    for (row, _), found in keyed(finalized(commands, folder, "greedy")).items():
        prompt = torch.tensor([tokenizer.encode(found["prompt"], add_special_tokens=False)])
        with torch.no_grad():
            expected = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=30,
                do_sample=False,
                eos_token_id=STOP,
                pad_token_id=0,
            )
        assert found["completion_ids"] == expected[0, prompt.shape[1] :].tolist(), row


def test_float16_alternatives_sum_to_one(commands, folder):
    run(commands, folder, "half", *INPUTS["parquet"], "prompt.column=question", "output=distill",
        "output.topk=20", "source.limit=8", "sampling.max_tokens=12", "sampling.temperature=1")  # fmt: skip
    table = finalized(commands, folder, "half")
    assert table.schema.field("topk_logprobs").type.value_type.value_type == pa.float16()
    for row in table.to_pylist():
        kept = np.exp(np.array(row["topk_logprobs"], np.float64)).sum(axis=1)
        assert np.abs(kept + row["tail_mass"] - 1).max() < 2e-3


MESSAGES = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Compute 2 + 2."},
]


@pytest.mark.parametrize(
    ("keys", "prompt"),
    [
        (("prompt.column=text",), "<|user|>Compute 1 + 1.<|end|><|assistant|>"),
        (("prompt.column=text", "prompt.chat=none"), "Compute 1 + 1."),
        (
            ("prompt.column=text", 'prompt.system="Be brief."'),
            "<|system|>Be brief.<|end|><|user|>Compute 1 + 1.<|end|><|assistant|>",
        ),
        (("prompt=messages",), "<|system|>Be short.<|end|><|user|>Compute 2 + 2.<|end|><|assistant|>"),
        (
            ("prompt=template", "prompt.template='Say {{ text | upper }}: {{ n + 1 }}'"),
            "<|user|>Say COMPUTE 1 + 1.: 8<|end|><|assistant|>",
        ),
        (("prompt=input_ids",), "Compute 3 + 3."),
    ],
)
def test_ways_to_ask(commands, tmp_path, tokenizer, keys, prompt):
    row = {
        "text": "Compute 1 + 1.",
        "messages": MESSAGES,
        "n": 7,
        "input_ids": tokenizer.encode("Compute 3 + 3.", add_special_tokens=False),
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "ways.parquet")
    ended = run(commands, tmp_path, "out", "source.path=ways.parquet", *keys, "sampling.max_tokens=4",
                "output.prompt_ids=true")  # fmt: skip
    (got,) = pipeline.open_parts(tmp_path / "out").to_table().to_pylist()
    assert got["prompt"] == prompt and prompt in ended.err
    assert got["prompt_ids"] == tokenizer.encode(prompt, add_special_tokens=False)
    assert got["input_ids" if "input_ids" in got else "input_input_ids"] == row["input_ids"]
    assert got["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("too_long", ["error", "skip", "truncate_left", "truncate_right"])
def test_prompts_that_are_too_long(commands, tmp_path, tokenizer, too_long):
    long = " ".join(f"word{i}" for i in range(300))
    pq.write_table(pa.table({"text": ["Compute 1 + 1.", long, "Compute 2 + 2."]}), tmp_path / "in.parquet")
    keys = ["prompt.column=text", "prompt.max_tokens=40", f"prompt.too_long={too_long}"]
    if too_long.startswith("truncate"):
        keys.append("prompt.truncate_column=text")
    run(commands, tmp_path, "out", "source.path=in.parquet", *keys, "sampling.max_tokens=4")
    rows = keyed(pipeline.open_parts(tmp_path / "out").to_table())
    num_tokens = len(tokenizer.encode(f"<|user|>{long}<|end|><|assistant|>", add_special_tokens=False))
    cut = rows[1, 0]
    assert rows[0, 0]["finish_reason"] in ("stop", "length") and rows[2, 0]["error"] is None
    if too_long == "error":
        assert cut["finish_reason"] == "error" and cut["error"]["code"] == "prompt_too_long"
        assert f"{num_tokens} tokens, the limit is 40" in cut["error"]["message"]
    elif too_long == "skip":
        assert (cut["finish_reason"], cut["error"]) == ("skipped", None)
    else:
        assert cut["prompt_tokens"] <= 40
        assert cut["prompt_tokens"] + cut["prompt_truncated_tokens"] == num_tokens
        # the frame stays whole, the document loses the end it is told to
        assert cut["prompt"].startswith("<|user|>") and cut["prompt"].endswith("<|end|><|assistant|>")
        assert ("word299" in cut["prompt"]) == (too_long == "truncate_left")
        assert ("word0" in cut["prompt"]) == (too_long == "truncate_right")


def test_what_cannot_change_the_output_may_change(commands, folder):
    name, keys = "again", ("source.path=q.parquet", "prompt.column=question", "sampling.max_tokens=8")
    run(commands, folder, name, *keys)
    parts = sorted((folder / name / "parts").iterdir())
    other = ("report.interval_s=3", "engine.max_num_seqs=5", "engine.mode=sync", "prompt.prefetch_rows=2",
             "output.commit_interval_s=9", "cost.gpu_hour_usd=3")  # fmt: skip
    ended = run(commands, folder, name, *keys, *other)
    assert "0 now, 60 before, none to do" in ended.out
    assert sorted((folder / name / "parts").iterdir()) == parts


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("sampling.temperature=0.5", r"sampling.temperature: 0.0 → 0.5"),
        ("seed=8", r"seed: 0 → 8"),
        ("sampling.n=2", r"sampling.n: 1 → 2"),
        ('prompt.system="Hello."', r"prompt.system: null → Hello."),
        ("source.limit=7", r"source.limit: null → 7"),
        ("output.prompt_ids=true", r"output.prompt_ids: false → true"),
        ("model.path=other_weights", r"model.weights: "),
        ("model.path=other_template", r"model.chat_template: "),
    ],
)
def test_what_can_change_the_output_is_refused(commands, folder, change, line):
    for name in ("other_weights", "other_template"):
        if not (folder / name).exists():
            shutil.copytree(TINY_MODEL, folder / name)
    weights = folder / "other_weights" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    template = folder / "other_template" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# other #}")
    keys = ("source.path=q.parquet", "prompt.column=question", "sampling.max_tokens=8")
    run(commands, folder, "kept", *keys)
    before = pipeline.open_parts(folder / "kept").num_rows
    ended = commands.run(*OWN_JOB, "output.dir=kept", *keys, change, cwd=folder)
    assert ended.code == 1
    assert "tokenmill: output.dir=kept holds another job: " in ended.err and line in ended.err, ended.err
    assert ended.err.count(" → ") == 1 and "another output.dir" in ended.err
    assert "Traceback" not in ended.err
    assert pipeline.open_parts(folder / "kept").num_rows == before == NUM_ROWS


def test_errors_are_done_until_retry_errors_says_otherwise(commands, tmp_path):
    texts = ["Compute 1 + 1."] * 10
    for row in (2, 5, 6):
        texts[row] = "word " * 60
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet")
    keys = ("source.path=in.parquet", "prompt.column=text", "sampling.max_tokens=8")
    # two blocks of 32 tokens hold the short rows alone
    small = ("engine.num_blocks=3", "engine.block_size=32")
    ended = run(commands, tmp_path, "out", *keys, *small)
    assert "3 error" in ended.out
    table = pipeline.open_parts(tmp_path / "out").to_table().to_pylist()
    assert {row["row"] for row in table if row["error"]} == {2, 5, 6}
    assert {row["error"]["code"] for row in table if row["error"]} == {"row_exceeds_kv_cache"}
    assert "0 now, 10 before" in run(commands, tmp_path, "out", *keys).out
    ended = run(commands, tmp_path, "out", *keys, "output.retry_errors=true")
    assert "3 now" in ended.out and "7 before" in ended.out
    rows = keyed(finalized(commands, tmp_path, "out"))
    assert len(rows) == 10 and all(row["error"] is None for row in rows.values())
    assert "0 now" in run(commands, tmp_path, "out", *keys, "output.retry_errors=true").out


def test_a_job_that_wrote_nothing_gives_way(commands, tmp_path):
    """A first start that failed must not bind the second to its mistakes."""
    write_questions(tmp_path / "q.parquet", 8)
    keys = ("source.path=q.parquet", "prompt.column=question", "output.dir=out", "sampling.max_tokens=4")
    failed = commands.run(*OWN_JOB, *keys, "seed=1", cwd=tmp_path, fault={"step_fails": 0})
    assert failed.code == 1 and (tmp_path / "out" / "job.json").exists()
    assert not list((tmp_path / "out" / "parts").iterdir())
    write_questions(tmp_path / "q.parquet", 9)
    run(commands, tmp_path, "out", *keys, "seed=2")
    assert finalized(commands, tmp_path, "out").num_rows == 9


def test_two_jobs_in_one_process(monkeypatch, tmp_path, capsys):
    from pipeline.run import main

    write_questions(tmp_path / "q.parquet", 12)
    monkeypatch.chdir(tmp_path)
    for name in ("HYDRA_FULL_ERROR", "TOKENMILL_TRACEBACK"):
        monkeypatch.setenv(name, "")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    keys = ("source.path=q.parquet", "prompt.column=question", "sampling.max_tokens=6", "sampling=diverse")
    try:
        for name in ("one", "two"):
            monkeypatch.setattr(sys, "argv", ["tokenmill", *OWN_JOB, *keys, f"output.dir={name}"])
            main()
    finally:
        root.handlers[:], root.level = handlers, level
    assert capsys.readouterr().out.count("none to do") == 2
    one, two = (keyed(pipeline.open_parts(tmp_path / name).to_table()) for name in ("one", "two"))
    assert one == two and len(one) == 12 * 4


def test_bitwise_on_a_gpu_is_of_one_gpu_and_of_its_step_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the same row may get other last bits on another GPU, or padded to other sizes."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    config = JobConfig(source=None, prompt=None)
    config.engine = EngineConfig(determinism=Determinism.bitwise, max_num_seqs=8, max_num_batched_tokens=64)
    assert prepare._bitwise_steps(config, cuda) == {
        "engine.bitwise_steps": "NVIDIA X, up to 64 tokens of 8 rows"
    }
    assert prepare._bitwise_steps(config, torch.device("cpu")) == {}
    config.engine = EngineConfig(determinism=Determinism.fast)
    assert prepare._bitwise_steps(config, cuda) == {}
