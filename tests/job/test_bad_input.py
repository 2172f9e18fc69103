"""What people get wrong: each ends with exit code 1 and one line of key, value, remedy; nothing is lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from real_jobs import OWN_JOB, TINY_MODEL, Ended, files_under, questions, write_questions

import pipeline

MADE = ("job.json", "input.arrow", "parts", "journal", "dataset")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    write_questions(path / "good.parquet", 12)
    good = (path / "good.parquet").read_bytes()
    (path / "torn.parquet").write_bytes(good[: len(good) // 2])
    (path / "garbage.parquet").write_bytes(b"PAR1 is not all there is to it PAR1")
    (path / "text.txt").write_text("hello\n")
    pq.write_table(pa.Table.from_pylist(questions(4)).slice(0, 0), path / "empty.parquet")
    (path / "empty.jsonl").touch()
    (path / "line2.jsonl").write_text('{"question": "a"}\n{"question": \n{"question": "c"}\n')
    (path / "two").mkdir()
    write_questions(path / "two" / "a.parquet", 4)
    pq.write_table(
        pa.table({"question": ["b"], "kind": ["text"], "tags": [["t"]]}), path / "two" / "b.parquet"
    )
    make_models(path)
    return path


def make_models(path: Path) -> None:
    for name, missing in (
        ("no_tokenizer", ("tokenizer.json", "tokenizer_config.json")),
        ("no_template", ("chat_template.jinja",)),
        ("no_config", ("config.json",)),
        ("no_weights", ("model.safetensors",)),
    ):
        shutil.copytree(TINY_MODEL, path / name, ignore=shutil.ignore_patterns(*missing))
    for name, file, content in (
        ("garbage_weights", "model.safetensors", bytes(1000)),
        ("torn_weights", "model.safetensors", (TINY_MODEL / "model.safetensors").read_bytes()[:-100]),
        ("garbage_config", "config.json", b"{not json"),
        ("garbage_generation", "generation_config.json", b"{not json"),
        (
            "missing_shard",
            "model.safetensors.index.json",
            b'{"weight_map": {"w": "model-2-of-2.safetensors"}}',
        ),
    ):
        shutil.copytree(TINY_MODEL, path / name)
        (path / name / file).write_bytes(content)
    for name, changes in (
        ("encoder_decoder", {"model_type": "t5", "is_encoder_decoder": True, "d_model": 64, "d_ff": 64}),
        ("chunked", {"layer_types": ["chunked_attention"] * 4}),
        ("dynamic", dynamic_rope(256)),
        ("more_layers", {"num_hidden_layers": 6}),
        ("other_width", {"hidden_size": 64, "head_dim": 16}),
        ("other_vocabulary", {"vocab_size": 2048}),
    ):
        shutil.copytree(TINY_MODEL, path / name)
        config = json.loads((path / name / "config.json").read_text()) | changes
        (path / name / "config.json").write_text(json.dumps(config))


def dynamic_rope(original: int) -> dict[str, Any]:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return {"rope_parameters": {**rope, "original_max_position_embeddings": original}}


def keys(*changes: str, name: str = "out") -> list[str]:
    usual = (*OWN_JOB, "source.path=good.parquet", "prompt.column=question", "sampling.max_tokens=4")
    given = {change.split("=")[0] for change in changes}
    return [*(key for key in usual if key.split("=")[0] not in given), f"output.dir={name}", *changes]


def assert_refused(ended: Ended, *said: str) -> None:
    assert ended.code == 1, ended.out
    assert "Traceback" not in ended.err, ended.err
    *_, last = ended.err.strip().split("\n")
    assert last.startswith("tokenmill: "), ended.err
    for words in said:
        assert words in last
    assert ended.out == ""


def own_model(name: str) -> tuple[str, ...]:
    return ("model=pretrained", f"model.path={name}")


REFUSED = {
    "missing column": (("prompt.column=nope",), "prompt.column=nope", "question, kind, tags"),
    "column in a template": (
        ("prompt=template", "prompt.column=null", "prompt.template='{{ nope }}'"),
        "prompt.template",
        "'nope'",
    ),
    "template": (
        ("prompt=template", "prompt.column=null", "prompt.template='{{ question'"),
        "prompt.template",
        "not a valid Jinja template",
    ),
    "two prompts": (("prompt.messages=question",), "prompt has", "set exactly one"),
    "filter column": (('source.filter="nope > 1"',), "source.filter='nope > 1'", "nope", "question"),
    "filter": (('source.filter="kind >"',), "source.filter='kind >'", "is not a Jinja expression"),
    "carried column": (("output.columns=[nope]",), "output.columns=['nope']", "question, kind, tags"),
    "no such file": (("source.path=absent.parquet",), "source.path=", "absent.parquet matches no file"),
    "garbage file": (("source.path=garbage.parquet",), "garbage.parquet cannot be read as Parquet"),
    "torn file": (("source.path=torn.parquet",), "torn.parquet cannot be read as Parquet"),
    "text for parquet": (("source.path=text.txt",), "text.txt cannot be read as Parquet"),
    "text for arrow": (("source=arrow", "source.path=text.txt"), "text.txt cannot be read as Arrow IPC"),
    "text for jsonl": (("source=jsonl", "source.path=text.txt"), "text.txt line 1 is not JSON"),
    "line of jsonl": (("source=jsonl", "source.path=line2.jsonl"), "line2.jsonl line 2 is not JSON"),
    "two schemas": (("source.path=two",), "b.parquet has column kind as string", "int64", "source.path"),
    "unknown key": (("sampling.temprature=1",), "sampling.temprature", "sampling.temperature?"),
    "added key": (("+sampling.nope=1",), "sampling.nope is not a key"),
    "type": (("sampling.temperature=hot",), "sampling.temperature", "'hot'"),
    "float for int": (("sampling.max_tokens=1.5",), "sampling.max_tokens", "'1.5'"),
    "text for a list": (('sampling.stop=""',), "sampling.stop"),
    "enum": (("prompt.too_long=chop",), "prompt.too_long", "'chop'", "truncate_left"),
    "empty stop": (('sampling.stop=[""]',), "sampling.stop=('',)", "remove the empty stop string"),
    "stop id": (("sampling.stop_token_ids=[1024]",), "sampling.stop_token_ids=[1024]", "0 to 1023"),
    "temperature": (("sampling.temperature=-1",), "sampling.temperature=-1.0", "use 0 for greedy"),
    "top_p": (("sampling.top_p=0",), "sampling.top_p=0.0", "use 1"),
    "top_k": (("sampling.top_k=0",), "sampling.top_k=0", "use null"),
    "n": (("sampling.n=0",), "sampling.n=0", "at least one"),
    "max_tokens": (("sampling.max_tokens=0",), "sampling.max_tokens=0", "at least one"),
    "min_tokens": (("sampling.min_tokens=5",), "sampling.min_tokens=5", "within max_tokens"),
    "limit": (("source.limit=-1",), "source.limit=-1", "use 0 or more"),
    "too long a row": (("model.max_model_len=513",), "model.max_model_len=513", "512", "lower it"),
    "too long a prompt": (("prompt.max_tokens=512",), "prompt.max_tokens=512", "use 511 or less"),
    "no block": (("engine.num_blocks=1",), "engine.num_blocks=1", "use 2 or more"),
    "few blocks": (
        ("engine.num_blocks=3", "engine.block_size=32", "sampling.max_tokens=64"),
        "engine.num_blocks=3",
        "65 tokens",
        "lower sampling.max_tokens",
    ),
    "no cache": (("engine.kv_cache_gb=0",), "engine.kv_cache_gb=0", "must be more than 0"),
    "topk without ids": (("output.topk=3",), "output.topk", "set output.completion_ids=true"),
    "topk": (("output.topk=1025", "output.completion_ids=true"), "output.topk=1025", "1024"),
    "gpu": (("model.device=cuda",), "model.device=cuda", "model.device=auto or cpu"),
    "no model": (("model=pretrained",), "model.path is not set", "model.path=..."),
    "no such model": (own_model("./absent"), "model.path=./absent", "no such folder"),
    "no such name": (own_model("absent"), "model.path=absent", "no such folder"),
    "a file as model": (own_model("text.txt"), "model.path=text.txt"),
    "no tokenizer": (own_model("no_tokenizer"), "model.path=no_tokenizer", "set model.tokenizer"),
    "no chat template": (own_model("no_template"), "model.path=no_template", "set prompt.chat=none"),
    "no config": (own_model("no_config"), "model.path=no_config", "has no config.json"),
    "garbage config": (own_model("garbage_config"), "model.path=garbage_config", "config.json"),
    "garbage generation config": (own_model("garbage_generation"), "generation_config.json cannot be read"),
    "no weights": (own_model("no_weights"), "model.path=no_weights has no weights", "again"),
    "garbage weights": (
        own_model("garbage_weights"),
        "model.path=garbage_weights: model.safetensors",
        "again",
    ),
    "torn weights": (own_model("torn_weights"), "model.path=torn_weights: model.safetensors", "again"),
    "missing shard": (own_model("missing_shard"), "model.path=missing_shard lacks model-2-of-2", "again"),
    "weights of fewer layers": (own_model("more_layers"), "model.path=more_layers", "is missing", "again"),
    "weights of another width": (own_model("other_width"), "model.path=other_width", "has shape", "again"),
    "weights of fewer ids": (own_model("other_vocabulary"), "[1024, 128]", "[2048, 128]"),
    "encoder-decoder": (own_model("encoder_decoder"), "model.path", "encoder-decoder"),
    "chunked attention": (own_model("chunked"), "model.path", "chunked_attention", "engine=transformers"),
    "dynamic rope": (own_model("dynamic"), "model.path", "dynamic RoPE", "model.max_model_len=256"),
    "output in a file": (("output.dir=text.txt/job",), "output.dir=", "text.txt", "choose a directory"),
    "output is a file": (("output.dir=text.txt",), "output.dir=", "text.txt", "choose a directory"),
    "output cannot be written": (("output.dir=/proc/job",), "output.dir=/proc/job", "choose a directory"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line_and_nothing_is_made(commands, folder, name):
    arguments, *said = REFUSED[name]
    out = f"out_{name.replace(' ', '_')}"
    given = [] if any(key.startswith("output.dir") for key in arguments) else [f"output.dir={out}"]
    usual = [key for key in keys(*arguments) if not key.startswith("output.dir=out")]
    assert_refused(commands.run(*usual, *given, cwd=folder), *said)
    assert pipeline_made(folder / out) == []


def pipeline_made(out: Path) -> list[Path]:
    """Rows, or files that speak of some."""
    return [path for name in ("parts", "journal", "dataset") for path in (out / name).rglob("*")]


def test_what_was_mended_runs_in_the_same_directory(commands, folder):
    """Also where only the weights themselves, read last, show what is wrong."""
    assert_refused(commands.run(*keys(*own_model("more_layers"), name="mended"), cwd=folder), "is missing")
    assert (folder / "mended" / "job.json").exists()
    assert commands.run(*keys(name="mended"), cwd=folder).code == 0
    assert commands.run("mended", cwd=folder, verb="verify").code == 0


def test_bad_commands_take_nothing_from_a_job_that_is_there(commands, folder):
    assert commands.run(*keys(name="kept"), cwd=folder).code == 0
    before = {name: data for name, data in files_under(folder / "kept").items() if name.startswith(MADE)}
    for name in ("missing column", "garbage file", "unknown key", "no weights", "few blocks", "top_p"):
        ended = commands.run(*keys(*REFUSED[name][0], name="kept"), cwd=folder)
        assert ended.code == 1 and "Traceback" not in ended.err, ended.err
    after = {name: data for name, data in files_under(folder / "kept").items() if name.startswith(MADE)}
    assert after == before and len(before) == 4


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("choice", [(), ('source.filter="kind == 1"', "source.shuffle=true")])
def test_an_empty_file_is_a_job_without_rows(commands, folder, kind, choice):
    name = f"empty_{kind}_{len(choice)}"
    arguments = keys(f"source={kind}", f"source.path=empty.{kind}", *choice, name=name)
    for _ in range(2):
        ended = commands.run(*arguments, cwd=folder)
        assert ended.code == 0, ended.err
        assert "0 now, none to do" in ended.out
    for verb in ("verify", "status", "finalize"):
        ended = commands.run(name, cwd=folder, verb=verb)
        assert ended.code == 0, ended.err
    assert pipeline.open_parts(folder / name).num_rows == 0
    table = datasets.load_from_disk(folder / name / "dataset")
    assert table.num_rows == 0 and "completion" in table.column_names


@pytest.mark.parametrize(
    "change",
    [
        "engine.block_size=7",
        "engine.block_size=1",
        "engine.max_num_seqs=1",
        "engine.max_num_batched_tokens=1",
        "sampling.max_tokens=9999",
    ],
)
def test_odd_sizes_work(commands, folder, change):
    """Whatever may seem odd and is not wrong gives what other sizes give."""
    usual = ("sampling.max_tokens=40", "source.limit=4", "output.completion_ids=true")
    name = f"odd_{change.replace('=', '_')}"
    if not (folder / "usual").exists():
        assert commands.run(*keys(*usual, name="usual"), cwd=folder).code == 0
    kept = (key for key in usual if key.split("=")[0] != change.split("=")[0])
    ended = commands.run(*keys(*kept, change, name=name), cwd=folder)
    assert ended.code == 0, ended.err

    def ids(job: str) -> dict[int, list[int]]:
        rows = pipeline.open_parts(folder / job).to_table().to_pylist()
        return {row["row"]: row["completion_ids"][:40] for row in rows}

    assert ids(name) == ids("usual") and len(ids(name)) == 4


def test_n_samples_of_the_likeliest_tokens_are_equal(commands, folder):
    arguments = keys("sampling=greedy", "sampling.n=3", "output.completion_ids=true", name="greedy_n")
    assert commands.run(*arguments, cwd=folder).code == 0
    samples: dict[int, set[tuple[int, ...]]] = {}
    for row in pipeline.open_parts(folder / "greedy_n").to_table().to_pylist():
        samples.setdefault(row["row"], set()).add(tuple(row["completion_ids"]))
    assert len(samples) == 12 and all(len(different) == 1 for different in samples.values())


def test_columns_of_the_wrong_type_are_errors_by_row_and_seen_at_the_start(commands, folder):
    ended = commands.run(*keys("prompt.column=kind", name="numbers"), cwd=folder)
    assert ended.code == 0
    assert "12 error" in ended.out
    shown = ended.err.split("first prompt\n")[1].split("\n")[0]
    assert "prompt_invalid" in shown and "kind" in shown


def test_a_row_filter_that_fails_is_an_error_of_its_row(commands, folder):
    ended = commands.run(*keys('source.filter="12 / kind > 5"', name="divided"), cwd=folder)
    assert ended.code == 0, ended.err
    rows = pipeline.open_parts(folder / "divided").to_table().to_pylist()
    failed = [row["row"] for row in rows if row["error"]]
    assert sorted(failed) == [0, 4, 8]
    assert {row["error"]["code"] for row in rows if row["error"]} == {"filter_failed"}


@pytest.mark.parametrize("verb", ["status", "verify", "finalize"])
@pytest.mark.parametrize("place", ["absent", "two", "text.txt"])
def test_verbs_name_a_place_that_is_no_job(commands, folder, verb, place):
    assert_refused(commands.run(place, cwd=folder, verb=verb), place)


def test_a_changed_input_is_refused(commands, folder):
    write_questions(folder / "changing.parquet", 20)
    arguments = keys("source.path=changing.parquet", name="changed")
    assert commands.run(*arguments, cwd=folder).code == 0
    write_questions(folder / "changing.parquet", 21)
    assert_refused(commands.run(*arguments, cwd=folder), "changing.parquet", "another output.dir")
    assert commands.run("changed", cwd=folder, verb="verify").code == 1
