"""The jobs that a command line stands for, as a script is told them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def sweep(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.sweep", *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )


def records(out: str) -> list[list[str]]:
    """Each job: its output directory, then its arguments."""
    return [record.split("\0") for record in out.split("\0\0")[:-1]]


def test_one_job_is_its_directory_and_its_arguments(tmp_path: Path) -> None:
    done = sweep(tmp_path, "conf=demo", "+hydra.job.env_set.A=b", "seed=3", "--config-dir", str(tmp_path))
    own = ["--config-dir", str(tmp_path), "+hydra.job.env_set.A=b"]
    assert records(done.stdout) == [[f"{tmp_path}/outputs/demo", *own, "conf=demo", "seed=3"]]
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_a_record_for_each_job(tmp_path: Path) -> None:
    text = "prompt.template='one, \"two\"'"
    done = sweep(
        tmp_path, "-m", "conf=demo", "seed=1,2", "output.dir='${seed} out'", text, "prompt.column=null"
    )
    jobs = records(done.stdout)
    assert [job[0] for job in jobs] == [f"{tmp_path}/1 out", f"{tmp_path}/2 out"]
    assert [job[1:3] for job in jobs] == [["conf=demo", f"seed={seed}"] for seed in (1, 2)]
    assert all(text in job for job in jobs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["conf=demo", "cluster.lease_s=-1"], "cluster.lease_s=-1"),
        (["-m", "conf=demo", "seed=1,2", "sampling.n=0,x", "output.dir=${seed}-${sampling.n}"], "sampling.n"),
        (["conf=demo", "--cfg", "job"], "--cfg job runs no job"),
    ],
)
def test_a_mistake_in_one_job_leaves_none(tmp_path: Path, words: list[str], said: str) -> None:
    done = sweep(tmp_path, *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in done.stderr and "Traceback" not in done.stderr
