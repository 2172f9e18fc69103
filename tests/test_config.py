"""The configuration tree as a user meets it: recipes, keys, mistakes, sweeps."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.config import (
    ArrowSource,
    EngineMode,
    HFSource,
    JsonlSource,
    OverLong,
    ParquetSource,
    SamplingDefaults,
)
from pipeline.failures import known_keys
from pipeline.run import conf_dir

RECIPES = sorted(path.stem for path in (conf_dir() / "conf").glob("*.yaml"))
# What a recipe leaves to its user. Without a workload there is no benchmark, but a job that is replaced here.
OWN = {"generate": ["source.path=in.parquet", "model.path=m"], "bench": ["bench.workload=null"]}


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_and_keeps_its_rules(command, recipe):
    result = command(f"conf={recipe}", *OWN.get(recipe, []))
    assert (result.code, result.err) == (0, "")
    assert result.jobs[0].output.dir == f"outputs/{recipe}"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("flags", [("--help",), ("--cfg", "job"), ("--info", "defaults")])
def test_every_recipe_can_be_looked_at_without_running(command, recipe, flags):
    result = command(f"conf={recipe}", *flags)
    assert (result.code, result.err, result.jobs) == (0, "", [])
    assert result.out


@pytest.mark.parametrize(
    ("group", "choice"),
    [
        (g, c)
        for g in ("prompt", "engine", "sampling", "output", "cost", "report", "model")
        for c in choices(g)
    ],
)
def test_every_choice_of_every_group_makes_a_valid_job(command, group, choice):
    own = ["prompt.template=x"] if choice == "template" else []
    own += ["model.path=m"] if choice == "pretrained" else []
    result = command(f"{group}={choice}", *own)
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize(
    ("kind", "cls"),
    [("parquet", ParquetSource), ("arrow", ArrowSource), ("jsonl", JsonlSource), ("hf", HFSource)],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_recipe_takes_any_kind_of_source(command, recipe, kind, cls):
    chosen = [f"source={kind}", "source.path=some/where", "model.path=m"]
    result = command(f"conf={recipe}", *OWN.get(recipe, []), *chosen)
    assert (result.code, result.err) == (0, "")
    assert type(result.jobs[0].source) is cls
    assert result.jobs[0].source.path == "some/where"


def test_nothing_given_runs_the_demo_from_files_of_the_package(command):
    job = command().jobs[0]
    assert isinstance(job.source, ParquetSource)
    assert pq.read_table(job.source.path).num_rows == 300
    assert (Path(job.model.path) / "model.safetensors").is_file()
    assert job.report.expected_column == "expected"


def test_distillation_keeps_ids_logprobs_and_alternatives_of_several_samples(command):
    job = command("conf=synth_data").jobs[0]
    assert isinstance(job.source, HFSource)
    assert job.sampling.n == 4
    assert job.sampling.defaults is SamplingDefaults.none
    assert job.output.completion_ids and job.output.logprobs and job.output.topk > 0


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_groups(command):
    assert command("conf=synth_data").jobs[0].sampling.max_tokens == 1024
    assert command("conf=synth_data", "sampling.max_tokens=7").jobs[0].sampling.max_tokens == 7
    # A group chosen on the command line replaces the recipe's choice, not the recipe's own values.
    job = command("conf=synth_data", "sampling=greedy").jobs[0]
    assert (job.sampling.temperature, job.sampling.n, job.sampling.max_tokens) == (0.0, 1, 1024)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_enum_values_are_typed_as_the_documentation_writes_them(command, mode):
    assert command(f"engine.mode={mode}").jobs[0].engine.mode is EngineMode(mode)
    assert f"mode: {mode}\n" in command("--cfg", "job", f"engine.mode={mode}").out


def test_a_recipe_of_ones_own(command, tmp_path):
    own = tmp_path / "recipes" / "conf"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /source: jsonl\n  - override /model: tiny\n"
        "source:\n  path: a.jsonl\nprompt:\n  too_long: truncate_left\n"
    )
    job = command("--config-dir", str(tmp_path / "recipes"), "conf=mine").jobs[0]
    assert isinstance(job.source, JsonlSource)
    assert job.prompt.too_long is OverLong.truncate_left
    assert job.output.dir == "outputs/mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["source.foo=1"], ["source.foo is not a key"]),
        (["sampling.temprature=1"], ["sampling.temprature", "sampling.temperature"]),
        (["sorce.path=x"], ["sorce.path", "source.path"]),
        (["+engine.speed=9"], ["engine.speed is not a key"]),
        (["+colour=red"], ["colour is not a key"]),
        (["source=parquet", "source.path=x", "source.split=a"], ["source.split", "another kind of source"]),
        (["source.limit=many"], ["source.limit", "many"]),
        (["sampling.temperature=warm"], ["sampling.temperature", "warm"]),
        (["engine.mode=asink"], ["engine.mode", "asink", "async"]),
        (["prompt.too_long=cut"], ["prompt.too_long", "cut", "truncate_left"]),
        (["conf=generate"], ["model.path and source.path are not set", "source.path=..."]),
        (["prompt=template"], ["template", "exactly one"]),
        (["conf=nope"], ["conf/nope", "demo"]),
        (["model=/models/llama"], ["model.path=..."]),
        (["source.skip=-1"], ["source.skip=-1", "0 or more"]),
        (["prompt.template=x"], ["exactly one"]),
        (["output.logprobs=true"], ["output.completion_ids=true"]),
        (["output.dir=${nowhere}"], ["output.dir", "nowhere"]),
        (["foo"], ["foo"]),
        (["model.path=${assets:nope}"], ["nope"]),
    ],
)
def test_a_mistake_is_named_in_one_line_with_exit_code_1(command, arguments, said):
    result = command(*arguments)
    assert (result.code, result.jobs) == (1, [])
    assert result.err.count("\n") == 1 and result.err.startswith("tokenmill: ")
    for words in said:
        assert words in result.err


def test_a_mistake_leaves_no_record_of_a_run(command, tmp_path):
    command("source.skip=-1")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_suggestions_come_from_the_real_keys():
    keys = known_keys()
    assert len(keys) == len(set(keys))
    assert {"source.path", "source.split", "sampling.n", "engine.mode", "seed"} <= set(keys)


def test_the_run_directory_is_the_output_directory_and_nobody_changes_into_it(command, tmp_path):
    for _ in range(2):
        job = command("output.dir=here", job=lambda config: print(os.getcwd()))
        assert job.out.strip() == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    # Nothing of hydra's lies where the job's own files go.
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["hydra"]


def test_each_worker_of_an_array_has_its_own_folder(command, tmp_path, monkeypatch):
    for task in "07":
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "42")
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
        command("output.dir=here", f"seed={task}")
    assert sorted(path.name for path in (tmp_path / "here" / "hydra").iterdir()) == ["42_0", "42_7"]
    assert "seed: 7" in (tmp_path / "here" / "hydra" / "42_7" / "config.yaml").read_text()


def test_help_tells_a_newcomer_what_to_type(command):
    text = command("--help").out
    for words in (
        "conf: bench, demo",
        "source.path",
        "output.dir",
        "conf=synth_data",
        "status|verify|finalize",
    ):
        assert words in text
    assert "_source" not in text  # schemas are no choices
    assert "Powered by" not in text


class TestSweeps:
    @pytest.mark.parametrize(
        ("sweep", "remedy"),
        [
            (["sampling.temperature=0,1"], "output.dir=outputs/sweep/${sampling.temperature}"),
            (["sampling=greedy,diverse"], "output.dir=outputs/sweep/${hydra:runtime.choices.sampling}"),
            (["seed=1,2", "output.dir=same"], "output.dir=outputs/sweep/${seed}"),
            # Two of the four share a directory.
            (["seed=1,2", "engine.mode=sync,async", "output.dir=o/${seed}"], "share output.dir="),
        ],
    )
    def test_jobs_that_would_share_a_directory_are_refused(self, command, tmp_path, sweep, remedy):
        result = command("--multirun", *sweep)
        assert (result.code, result.jobs) == (1, [])
        assert remedy in result.err
        assert not list(tmp_path.rglob("config.yaml"))

    def test_the_remedy_given_works(self, command):
        result = command("--multirun", "seed=1,2", "output.dir=outputs/sweep/${seed}")
        assert result.code == 0
        assert [(job.seed, job.output.dir) for job in result.jobs] == [
            (1, "outputs/sweep/1"),
            (2, "outputs/sweep/2"),
        ]

    def test_recipes_have_directories_of_their_own(self, command, tmp_path):
        result = command("--multirun", "conf=demo,synth_data")
        assert [job.output.dir for job in result.jobs] == ["outputs/demo", "outputs/synth_data"]
        assert (tmp_path / "outputs" / "synth_data" / "hydra").is_dir()

    def test_a_job_that_fails_ends_the_sweep_with_one_message(self, command):
        def fail(config):
            raise ValueError(f"seed={config.seed} is no good")

        result = command("--multirun", "seed=1,2", "output.dir=o/${seed}", job=fail)
        assert (result.code, result.err) == (1, "tokenmill: seed=1 is no good\n")


class TestSecrets:
    GIVEN = (
        "+source.storage_options.secret=geheim",
        "+source.storage_options.deep={token:geheim,a:{b:geheim}}",
    )

    def test_are_masked_in_every_dump(self, command):
        for flags in (
            ("--cfg", "job"),
            ("--cfg", "all"),
            ("--info", "config"),
            ("--cfg", "job", "--resolve"),
        ):
            result = command(*flags, *self.GIVEN)
            assert "geheim" not in result.out + result.err
            assert "***" in result.out

    def test_reach_the_job_but_no_file(self, command, tmp_path):
        job = command(*self.GIVEN).jobs[0]
        assert job.source.storage_options == {
            "secret": "geheim",
            "deep": {"token": "geheim", "a": {"b": "geheim"}},
        }
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert {"config.yaml", "overrides.yaml"} <= {path.name for path in files}
        assert all("geheim" not in path.read_text() for path in files)

    def test_of_the_environment_stay_where_they_are(self, command, tmp_path, monkeypatch):
        monkeypatch.setenv("STORE_KEY", "geheim")
        result = command("+source.storage_options.secret=${oc.env:STORE_KEY}")
        assert result.jobs[0].source.storage_options == {"secret": "geheim"}
        record = next(tmp_path.rglob("config.yaml")).read_text()
        assert "storage_options" in record and "geheim" not in record

    def test_do_not_leave_with_a_sweep_or_verbosely(self, command, tmp_path):
        arguments = ["--multirun", "hydra.verbose=true", *self.GIVEN, "seed=1,2", "output.dir=o/${seed}"]
        result = command(*arguments)
        assert len(result.jobs) == 2
        assert "geheim" not in result.out + result.err
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert "multirun.yaml" in {path.name for path in files}
        assert all("geheim" not in path.read_text() for path in files)

    def test_do_not_leave_with_the_log(self, command, tmp_path):
        def log(config):
            logging.getLogger("job").info("reading with storage_options=%s", config.source.storage_options)

        assert command(*self.GIVEN, "output.dir=here", job=log).err == ""
        text = next((tmp_path / "here" / "hydra").rglob("run.log")).read_text()
        assert "reading with storage_options=***" in text and "geheim" not in text

    def test_do_not_leave_with_an_error(self, command):
        def fail(config):
            raise RuntimeError(f"connection to storage_options={config.source.storage_options} failed")

        result = command(*self.GIVEN, job=fail)
        assert result.code == 1
        assert "geheim" not in result.err and "RuntimeError" in result.err


class TestFailures:
    def test_a_users_error_is_one_line(self, command):
        def fail(config):
            raise FileNotFoundError(2, "No such file or directory", "in.parquet")

        result = command(job=fail)
        assert (result.code, result.err) == (1, "tokenmill: in.parquet: No such file or directory\n")

    @pytest.mark.parametrize("variable", ["TOKENMILL_TRACEBACK", "HYDRA_FULL_ERROR"])
    def test_the_traceback_is_there_for_who_asks(self, command, monkeypatch, variable):
        def fail(config):
            raise ValueError("model.path=m is no model")

        monkeypatch.setenv(variable, "1")
        result = command(job=fail)
        assert result.code == 1
        assert "Traceback" in result.err and "in fail" in result.err
        assert result.err.endswith("tokenmill: model.path=m is no model\n")

    def test_an_error_of_ours_shows_its_traceback_unasked(self, command):
        def fail(config):
            raise AssertionError("two rows, one key")

        result = command(job=fail)
        assert result.code == 1
        assert "in fail" in result.err and "two rows, one key" in result.err

    def test_an_interrupt_says_how_to_go_on(self, command):
        def fail(config):
            raise KeyboardInterrupt

        result = command(job=fail)
        assert result.code == 130
        assert "same command" in result.err
