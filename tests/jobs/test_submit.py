"""What submit.sh asks of sbatch: options, arrays, sweeps, quoting. No Slurm is needed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs.fake_slurm import JOBS, FakeSlurm

WORKER, FINALIZE = str(JOBS / "generate.sbatch"), str(JOBS / "finalize.sbatch")
IMAGE = "SITE_IMAGE=/images/tokenmill.sif"
AWKWARD = [
    "prompt.template='it\\'s {{ a }}, \"b\" $HOME `id` \\\\ * ; #'",
    "prompt.column=null",
    "source.path=[one.parquet, 'two two.parquet']",
    "sampling.stop=['\n', \"a'b\", '[x]']",
    "+prompt.chat_template_kwargs={enable_thinking: false}",
]


def options(call: Sequence[str], script: str) -> list[str]:
    return list(call[: call.index(script)])


def arrays(calls: Sequence[Sequence[str]]) -> list[str]:
    return [word for call in calls for word in call if word.startswith("--array=")]


@pytest.mark.parametrize(
    ("site", "signal"),
    [
        ("", "B:USR1@120"),
        ("SITE_LAUNCH=bare", "B:USR1@120"),
        ("SITE_LAUNCH=srun SITE_SIGNAL_S=300", "USR1@300"),
        (f"SITE_LAUNCH=apptainer {IMAGE}", "USR1@120"),
        (f"SITE_LAUNCH=pyxis {IMAGE}", "USR1@120"),
    ],
)
def test_each_launch_style_has_its_form_of_the_signal(slurm: FakeSlurm, site: str, signal: str) -> None:
    slurm.site(site.replace(" ", "\n"))
    assert slurm.submit_demo("seed=7").returncode == 0
    worker, finalize = slurm.calls("sbatch")
    assert f"--signal={signal}" in options(worker, WORKER)
    assert worker[worker.index(WORKER) + 1 :] == ["seed=7", "conf=demo"]
    assert "--array=0-63" in worker
    assert "--dependency=afterany:101" in options(finalize, FINALIZE)
    assert finalize[finalize.index(FINALIZE) + 1 :] == [str(slurm.folder / "outputs" / "demo")]


def test_what_is_not_set_is_not_passed(slurm: FakeSlurm) -> None:
    slurm.site("SITE_PARTITION=\nSITE_QOS=")
    slurm.submit_demo()
    worker, finalize = slurm.calls("sbatch")
    assert options(worker, WORKER) == [
        "--parsable",
        "--job-name=tokenmill-demo",
        "--signal=B:USR1@120",
        "--array=0-63",
    ]
    assert options(finalize, FINALIZE) == [
        "--parsable",
        "--job-name=tokenmill-demo-finalize",
        "--dependency=afterany:101",
    ]


def test_what_is_set_is_passed(slurm: FakeSlurm) -> None:
    slurm.site(
        "SITE_PARTITION=gpu SITE_ACCOUNT=p17 SITE_QOS=low SITE_TIME=4:00:00 SITE_GPUS=h100:2 SITE_CPUS=8\n"
        "SITE_MEM=64G SITE_LOG_DIR='my logs' SITE_ARRAY_SIZE=8 SITE_ARRAY_LIMIT=3\n"
        "SITE_SBATCH_OPTIONS=(--constraint='a&b' --mail-type=END)\n"
        "SITE_FINALIZE_PARTITION=cpu SITE_FINALIZE_TIME=60 SITE_FINALIZE_MEM=4G SITE_FINALIZE_CPUS=2\n"
    )
    assert slurm.submit_demo().returncode == 0
    worker, finalize = slurm.calls("sbatch")
    assert set(options(worker, WORKER)) == {
        *("--parsable", "--job-name=tokenmill-demo", "--signal=B:USR1@120", "--array=0-7%3"),
        *("--partition=gpu", "--account=p17", "--qos=low", "--time=4:00:00", "--gres=gpu:h100:2"),
        *("--cpus-per-task=8", "--mem=64G", "--output=my logs/%x-%A_%a.out"),
        *("--constraint=a&b", "--mail-type=END"),
    }
    assert set(options(finalize, FINALIZE)) == {
        *("--parsable", "--job-name=tokenmill-demo-finalize", "--dependency=afterany:101"),
        *("--partition=cpu", "--account=p17", "--qos=low", "--time=60", "--cpus-per-task=2", "--mem=4G"),
        "--output=my logs/%x-%j.out",
    }
    assert (slurm.folder / "my logs").is_dir()


def test_the_environment_wins_over_the_file_here_and_in_the_tasks(slurm: FakeSlurm) -> None:
    slurm.site("SITE_ARRAY_SIZE=64\nSITE_LAUNCH=bare")
    shown = slurm.submit_demo("--dry-run", SITE_ARRAY_SIZE="4", SITE_LAUNCH="srun").stdout
    slurm.shell(shown)  # without these variables
    worker, _ = slurm.calls("sbatch")
    assert "--array=0-3" in worker and "--signal=USR1@120" in worker
    assert "SITE_LAUNCH=srun" in shown and f"TOKENMILL_SITE={slurm.site_file}" in shown


def test_a_list_from_the_environment_takes_the_place_of_the_files(slurm: FakeSlurm) -> None:
    slurm.site("SITE_SBATCH_OPTIONS=(--comment='a b' --exclusive)\nSITE_FINALIZE_SBATCH_OPTIONS=(--nice)")
    slurm.submit_demo(SITE_SBATCH_OPTIONS="--nodelist=n7  --hold", SITE_FINALIZE_SBATCH_OPTIONS="")
    worker, finalize = slurm.calls("sbatch")
    assert options(worker, WORKER)[-3:] == ["--nodelist=n7", "--hold", "--array=0-63"]
    assert options(finalize, FINALIZE)[2:] == ["--dependency=afterany:101"]


def test_a_dry_run_runs_nothing_and_prints_what_would_be_run(slurm: FakeSlurm) -> None:
    slurm.site("SITE_LOG_DIR='new logs'\nSITE_ARRAY_SIZE=2000\nSITE_SBATCH_OPTIONS=(--comment='a \"b\"')")
    dry = slurm.submit_demo("--dry-run", *AWKWARD)
    assert dry.returncode == 0, dry.stderr
    assert slurm.calls("sbatch") == [] and not (slurm.folder / "new logs").exists()
    assert slurm.shell(dry.stdout).returncode == 0
    by_hand = slurm.calls("sbatch")
    assert slurm.submit_demo(*AWKWARD).returncode == 0
    assert slurm.calls("sbatch") == by_hand
    assert len(by_hand) == 3


def test_awkward_overrides_arrive_as_they_were_typed(slurm: FakeSlurm) -> None:
    done = slurm.submit(*AWKWARD, "conf=demo", "output.dir='out put/it''s'")
    assert done.returncode == 1  # hydra has no doubled quotes
    assert slurm.calls("sbatch") == []
    done = slurm.submit(*AWKWARD, "conf=demo", "output.dir='out put/it\\'s'")
    assert done.returncode == 0, done.stderr
    worker, finalize = slurm.calls("sbatch")
    assert worker[worker.index(WORKER) + 1 :] == [*AWKWARD, "conf=demo", "output.dir='out put/it\\'s'"]
    assert finalize[-1] == str(slurm.folder / "out put" / "it's")


def test_more_workers_than_an_array_holds_are_several_arrays(slurm: FakeSlurm) -> None:
    slurm.site("SITE_ARRAY_SIZE=2500\nSITE_ARRAY_LIMIT=14")
    assert slurm.submit_demo().returncode == 0
    *workers, finalize = slurm.calls("sbatch")
    assert arrays(workers) == ["--array=0-1000%4", "--array=0-1000%4", "--array=0-497%4"]
    assert "--dependency=afterany:101:102:103" in finalize


@pytest.mark.parametrize(("size", "expected"), [("1001", ["0-1000"]), ("1002", ["0-1000", "0-0"])])
def test_the_cluster_says_how_long_an_array_may_be(slurm: FakeSlurm, size: str, expected: list[str]) -> None:
    slurm.submit_demo(SITE_ARRAY_SIZE=size)
    assert arrays(slurm.calls("sbatch")) == [f"--array={tasks}" for tasks in expected]
    slurm.submit_demo(SITE_ARRAY_SIZE="3", MAX_ARRAY_SIZE="2")
    assert arrays(slurm.calls("sbatch")) == ["--array=0-1", "--array=0-0"]


def test_a_sweep_is_an_array_for_each_combination(slurm: FakeSlurm) -> None:
    directory = "output.dir=out/${seed}-${sampling.temperature}"
    done = slurm.submit("--multirun", "conf=demo", "seed=1,2", "sampling.temperature=0.5,1.0", directory)
    assert done.returncode == 0, done.stderr
    calls = slurm.calls("sbatch")
    assert len(calls) == 8
    for number, (seed, temperature) in enumerate([("1", "0.5"), ("1", "1.0"), ("2", "0.5"), ("2", "1.0")]):
        worker, finalize = calls[2 * number : 2 * number + 2]
        assert finalize[-1] == str(slurm.folder / "out" / f"{seed}-{temperature}")
        assert f"--dependency=afterany:{101 + 2 * number}" in finalize
        arguments = worker[worker.index(WORKER) + 1 :]
        assert {"conf=demo", f"seed={seed}", f"sampling.temperature={temperature}"} < set(arguments)
    # A task, which is told its combination only, comes to the same directory.
    again = slurm.submit("--dry-run", *arguments)
    assert finalize[-1] in again.stdout, again.stderr


def test_recipes_of_ones_own_and_hydras_keys_go_to_the_workers_too(slurm: FakeSlurm) -> None:
    recipes = slurm.folder / "my recipes" / "conf"
    recipes.mkdir(parents=True)
    (recipes / "mine.yaml").write_text("# @package _global_\nseed: 5\noutput: {dir: mine}\n")
    given = ["--config-dir", "my recipes", "hydra.job_logging.root.level=INFO"]
    done = slurm.submit(*given, "conf=mine", "source.path=x", "prompt.column=q", "model.path=m")
    assert done.returncode == 0, done.stderr
    worker, finalize = slurm.calls("sbatch")
    assert set(given) < set(worker) and worker[worker.index("--config-dir") + 1] == "my recipes"
    assert finalize[-1] == str(slurm.folder / "mine")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["conf=demo", "sampling.temprature=1"], "did you mean sampling.temperature?"),
        (["conf=generate"], "are not set"),
        (["--multirun", "conf=demo", "seed=1,2"], "share output.dir"),
        (["conf=demo", "seed=1,2"], "--multirun"),
    ],
)
def test_a_mistake_in_a_key_ends_before_anything_is_queued(
    slurm: FakeSlurm, words: list[str], said: str
) -> None:
    done = slurm.submit(*words)
    assert done.returncode != 0
    assert said in done.stderr and "Traceback" not in done.stderr
    assert slurm.calls("sbatch") == []
    assert {path.name for path in slurm.folder.iterdir()} <= {"bin", "site.env", "calls.jsonl"}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"SITE_LAUNCH": "docker"}, "SITE_LAUNCH=docker is none of bare"),
        ({"SITE_LAUNCH": "pyxis"}, "needs SITE_IMAGE"),
        ({"SITE_ARRAY_SIZE": "0"}, "SITE_ARRAY_SIZE=0"),
        ({"SITE_ARRAY_SIZE": "3000", "SITE_ARRAY_LIMIT": "2"}, "SITE_ARRAY_LIMIT=2 is less"),
        ({"MAX_ARRAY_SIZE": "0"}, "runs no job arrays"),
        ({"TOKENMILL_SITE": "nowhere.env"}, "nowhere.env is no file"),
    ],
)
def test_a_mistake_of_the_site_too(slurm: FakeSlurm, env: dict[str, str], said: str) -> None:
    done = slurm.submit_demo(**env)
    assert done.returncode != 0 and said in done.stderr
    assert slurm.calls("sbatch") == []


def test_a_refusal_of_sbatch_ends_it(slurm: FakeSlurm) -> None:
    done = slurm.submit_demo(FAIL_AT=WORKER)
    assert done.returncode == 1 and "refused" in done.stderr
    assert len(slurm.calls("sbatch")) == 1


def test_help_tells_the_options(slurm: FakeSlurm) -> None:
    done = slurm.submit("--help")
    assert done.returncode == 0
    assert "--dry-run" in done.stdout and "--multirun" in done.stdout and "set -e" not in done.stdout


def test_the_example_of_a_site_is_a_site(slurm: FakeSlurm) -> None:
    example = (JOBS / "site.env.example").read_text()
    slurm.site(example)
    slurm.submit_demo()
    assert options(slurm.calls("sbatch")[0], WORKER)[1:] == [
        "--job-name=tokenmill-demo",
        "--signal=B:USR1@120",
        "--array=0-63",
    ]
    named = {word for path in JOBS.iterdir() for word in _site_names(path.read_text())}
    spoken_of = set(_site_names(example)) | {"SITE_FROM_ENVIRONMENT"}
    assert named == spoken_of


def _site_names(text: str) -> list[str]:
    return re.findall(r"SITE_[A-Z_]+", text.replace("TOKENMILL_SITE", "").replace("SITE_…", ""))


def test_what_sbatch_reads_in_the_worker_suits_a_call_without_submit() -> None:
    text = Path(WORKER).read_text()
    for option in ("--requeue", "--open-mode=append", "--signal=B:USR1@120", "--ntasks=1"):
        assert f"\n#SBATCH {option}\n" in text
