"""What a task does on its node: how python is started, signals, caches. No Slurm is needed."""

from __future__ import annotations

import getpass
import os
import signal
import stat
from pathlib import Path

import pytest
from jobs.fake_slurm import JOBS, NOTES_SIGNALS, FakeSlurm

WORDS = ["conf=demo", "prompt.template='a b'", "seed=$(id)"]
PIPELINE = ["-m", "pipeline.run"]


def test_bare_becomes_python(slurm: FakeSlurm) -> None:
    process = slurm.start("generate.sbatch", *WORDS, PYTHON_DOES="print(os.getpid())")
    assert process.communicate()[0] == f"{process.pid}\n"
    (seen,) = slurm.seen()
    requeue = ["cluster.max_restarts=20", "cluster.requeue=scontrol"]
    assert seen.words == [*PIPELINE, *WORDS, *requeue]


@pytest.mark.parametrize("code", [0, 1, 75, 138])
def test_its_exit_code_is_the_tasks(slurm: FakeSlurm, code: int) -> None:
    for launch in ("bare", "srun"):
        done = slurm.task("generate.sbatch", *WORDS, SITE_LAUNCH=launch, PYTHON_DOES=f"sys.exit({code})")
        assert done.returncode == code
    assert slurm.calls("scontrol") == []


def test_srun_starts_a_step_with_the_tasks_cpus(slurm: FakeSlurm) -> None:
    slurm.task("generate.sbatch", *WORDS, SITE_LAUNCH="srun", SLURM_CPUS_PER_TASK="6", SITE_MAX_RESTARTS="3")
    (call,) = slurm.calls("srun")
    requeue = ["cluster.max_restarts=3", "cluster.requeue=exit_code"]
    expected = ["--ntasks=1", "--cpus-per-task=6", "worker-python", *PIPELINE, *WORDS, *requeue]
    assert call == expected


def test_apptainer_sees_what_the_task_reads_and_writes(slurm: FakeSlurm) -> None:
    (slurm.folder / "huggingface").mkdir()
    slurm.site("SITE_LAUNCH=apptainer SITE_IMAGE=/i/t.sif SITE_MOUNTS=(/data '/my data:/d:ro') SITE_GPUS=1")
    slurm.task("generate.sbatch", *WORDS)
    call = slurm.calls("srun")[0]
    node = _node(slurm)
    binds = [call[i + 1] for i, word in enumerate(call) if word == "--bind"]
    hub = slurm.folder / "huggingface"
    assert binds == [
        *map(str, (slurm.folder, JOBS.parent, node)),
        "/data",
        "/my data:/d:ro",
        f"{hub}:{hub}:ro",
    ]
    assert call[:5] == ["--ntasks=1", "apptainer", "exec", "--pwd", str(slurm.folder)] and "--nv" in call
    assert call[call.index("/i/t.sif") :][:4] == ["/i/t.sif", "worker-python", *PIPELINE]
    assert slurm.seen()[0].words[2:5] == WORDS


def test_pyxis_gets_the_image_and_the_mounts(slurm: FakeSlurm) -> None:
    slurm.site(
        "SITE_LAUNCH=pyxis SITE_IMAGE='registry#team/tokenmill:1' SITE_MOUNTS=(/data:/d)\n"
        "SITE_CONTAINER_OPTIONS=(--no-container-mount-home)"
    )
    slurm.task("generate.sbatch", *WORDS)
    (call,) = slurm.calls("srun")
    here, root, node = slurm.folder, JOBS.parent, _node(slurm)
    assert call[:6] == [
        "--ntasks=1",
        "--container-image=registry#team/tokenmill:1",
        f"--container-workdir={here}",
        f"--container-mounts={here}:{here},{root}:{root},{node}:{node},/data:/d",
        "--no-container-mount-home",
        "worker-python",
    ]


def test_several_gpus_have_a_worker_each(slurm: FakeSlurm) -> None:
    for gpus in ("", "1", "h100:1", "4", "h100:8", "a:b:16"):
        slurm.task("generate.sbatch", *WORDS, SITE_GPUS=gpus)
    assert ["launcher=local" in seen.words for seen in slurm.seen()] == [False] * 3 + [True] * 3


def test_the_environment_of_the_site_is_entered(slurm: FakeSlurm) -> None:
    slurm.site('site_activate() { echo "${NOT_SET_ANYWHERE}"; export FROM_SITE=yes; }')
    assert slurm.task("generate.sbatch", *WORDS).returncode == 0
    assert slurm.seen()[0].env["FROM_SITE"] == "yes"


def test_where_the_checkout_is_slurm_can_say(slurm: FakeSlurm) -> None:
    shown = f"{JOBS}/generate.sbatch conf=demo output.dir=/x/jobs/generate.sbatch"
    done = slurm.task("generate.sbatch", *WORDS, TOKENMILL_ROOT="", SHOWN_COMMAND=shown)
    assert done.returncode == 0, done.stderr
    assert slurm.calls("scontrol") == [["show", "job", "20_3"]]
    assert len(slurm.seen()) == 1


def test_a_bare_python_has_the_signals_to_itself(slurm: FakeSlurm) -> None:
    process = slurm.start("generate.sbatch", *WORDS, PYTHON_DOES=NOTES_SIGNALS)
    slurm.wait_for_python(process)
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=20)[0].split() == ["SIGUSR1"]
    assert process.returncode == 138


@pytest.mark.parametrize("launch", ["bare", "srun"])
def test_a_warning_before_python_is_up_does_not_kill(slurm: FakeSlurm, launch: str) -> None:
    slurm.site(f"SITE_LAUNCH={launch}\nsite_activate() {{ kill -USR1 $$; }}")
    assert slurm.task("generate.sbatch", *WORDS).returncode == 0
    assert len(slurm.seen()) == 1


def test_a_step_gets_the_warning_that_came_to_the_script_alone(slurm: FakeSlurm) -> None:
    process = slurm.start("generate.sbatch", *WORDS, SITE_LAUNCH="srun", PYTHON_DOES=NOTES_SIGNALS)
    slurm.wait_for_python(process)
    # what TERM does to a step, it does without the script: an srun that gets it kills
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=20)[0].split() == ["SIGUSR1"]
    assert process.returncode == 138


def test_a_step_that_asks_for_another_life_gets_it(slurm: FakeSlurm) -> None:
    env = {"SITE_LAUNCH": "srun", "PYTHON_DOES": "sys.exit(85)"}
    done = slurm.task("generate.sbatch", *WORDS, **env)
    assert done.returncode == 75
    # not 21: the job of an array's last task has the array's own number
    assert slurm.calls("scontrol") == [["requeue", "20_3"]]
    slurm.task("generate.sbatch", *WORDS, SLURM_ARRAY_JOB_ID="", SLURM_ARRAY_TASK_ID="", **env)
    assert slurm.calls("scontrol") == [["requeue", "21"]]


def test_workers_are_offline_and_write_on_their_node(slurm: FakeSlurm) -> None:
    slurm.site(f"SITE_NODE_DIR='{slurm.folder}/local disk'\nSITE_HF_HOME=/shared/hub")
    slurm.task("generate.sbatch", *WORDS)
    env, node = slurm.seen()[0].env, f"{slurm.folder}/local disk"
    assert (env["HF_HUB_OFFLINE"], env["HF_HOME"]) == ("1", "/shared/hub")
    for cache in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_MODULES_CACHE", "HF_DATASETS_CACHE"):
        assert env[cache].startswith(f"{node}/") and Path(env[cache]).is_dir(), cache
    assert env["TMPDIR"] == f"{node}/tmp"
    assert float(env["SLURM_JOB_END_TIME"]) > 1.89e9
    slurm.task("generate.sbatch", *WORDS, SITE_HF_HUB_OFFLINE="0")
    assert slurm.seen()[1].env["HF_HUB_OFFLINE"] == "0"


def test_datasets_of_the_shared_cache_are_there_with_locks_of_the_nodes_own(slurm: FakeSlurm) -> None:
    shared = slurm.folder / "huggingface" / "datasets"
    (shared / "a___b" / "x y").mkdir(parents=True)
    (shared / "a___b" / "x y" / "data.arrow").write_text("rows")
    (shared / "a___b.lock").write_text("")
    does = """
open(os.environ["HF_DATASETS_CACHE"] + "/a___b.lock", "a").write("mine")
print(open(os.environ["HF_DATASETS_CACHE"] + "/a___b/x y/data.arrow").read())
"""
    for _ in range(2):
        assert slurm.task("generate.sbatch", *WORDS, PYTHON_DOES=does).stdout == "rows\n"
    assert (shared / "a___b.lock").read_text() == ""
    (shared / "later.arrow").write_text("more")
    slurm.task("generate.sbatch", *WORDS)
    assert (_node(slurm) / "datasets" / "later.arrow").read_text() == "more"


def test_weights_are_staged_on_the_nodes_disk_if_the_site_says_so(slurm: FakeSlurm) -> None:
    slurm.site(f'SITE_STAGE_MODELS=yes\nSITE_NODE_DIR="{slurm.folder}/it\'s local"')
    slurm.task("generate.sbatch", *WORDS)
    staged = "model.stage_dir='" + str(slurm.folder).replace("'", "\\'") + "/it\\'s local/models'"
    assert slurm.seen()[0].words[-2:] == [staged, "cluster.requeue=scontrol"]
    slurm.site("")
    slurm.task("generate.sbatch", *WORDS)
    assert not [word for word in slurm.seen()[1].words if "stage_dir" in word]


VERIFY, DIRECTORY = ["-m", "pipeline.verify"], "/out put/job"


def test_finalize_proves_compacts_and_proves_again(slurm: FakeSlurm) -> None:
    slurm.site("SITE_FINALIZE_ARGUMENTS=(--format both)\nSITE_GPUS=4")
    assert slurm.task("finalize.sbatch", DIRECTORY).returncode == 0
    assert [seen.words for seen in slurm.seen()] == [
        [*VERIFY, DIRECTORY],
        ["-m", "pipeline.finalize", DIRECTORY, "--format", "both"],
        [*VERIFY, DIRECTORY, "--manifest"],
    ]


def test_finalize_of_an_incomplete_job_writes_no_dataset(slurm: FakeSlurm) -> None:
    done = slurm.task("finalize.sbatch", DIRECTORY, PYTHON_DOES="sys.exit(1)")
    assert done.returncode == 1 and "is not complete" in done.stderr
    assert [seen.words for seen in slurm.seen()] == [[*VERIFY, DIRECTORY]]


def test_finalize_fails_where_the_dataset_is_not_proved(slurm: FakeSlurm) -> None:
    does = "n = len(open(folder + '/python.jsonl').readlines()); sys.exit(n == 3)"
    assert slurm.task("finalize.sbatch", DIRECTORY, PYTHON_DOES=does).returncode == 1


def test_the_scripts_are_whole() -> None:
    for path in JOBS.iterdir():
        if path.suffix in (".sh", ".sbatch"):
            assert os.system(f"bash -n '{path}'") == 0
    assert (JOBS / "submit.sh").stat().st_mode & stat.S_IXUSR


def _node(slurm: FakeSlurm) -> Path:
    return slurm.folder / f"tokenmill-{getpass.getuser()}"
