"""Arrays on a real Slurm: requeued, cancelled, preempted, out of time, on a lost node. Each ends complete.

The scripts of jobs/ run the real command line; only the model is missing (`stub_run.py`). What Slurm takes
its time for, a lost node and a time limit, is started first and looked at last.
"""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import pytest
from cluster.slurm_cluster import SlurmCluster
from cluster.slurm_config import MAX_ARRAY_SIZE
from real_jobs import committed_rows, write_questions

from pipeline.output.verify import verify

pytestmark = pytest.mark.slurm
ENDED_BY_TERM = re.compile(r"stopped +by SIGTERM")

ROOT = Path(__file__).resolve().parent.parent.parent
STUB = Path(__file__).with_name("stub_run.py")
# Quick to notice the dead, and to notice that nothing is left.
SETTINGS = (
    "cluster.heartbeat_s=0.5",
    "cluster.lease_s=5",
    "cluster.poll_s=0.2",
    "output.commit_interval_s=0.5",
)
_PATIENCE_S = 90.0


@dataclass
class Job:
    """A job on the cluster: some rows, a row's time, and the arrays that work on it."""

    cluster: SlurmCluster
    folder: Path
    num_rows: int
    row_s: float
    arrays: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        write_questions(self.folder / "rows.parquet", self.num_rows)
        python = self.folder / "stub-python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STUB}" "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        self.output = self.folder / "out"

    @property
    def keys(self) -> list[str]:
        rows = ["source=parquet", f"source.path='{self.folder}/rows.parquet'", "source.unit_rows=4"]
        return [
            "conf=generate",
            *rows,
            "prompt.column=question",
            "model.path=none",
            *SETTINGS,
            "output.dir=out",
        ]

    def submit(self, node: str, **site: str) -> list[str]:
        """Through submit.sh, to one node; the ids of the arrays, and at the end of finalize."""
        site = {
            "SITE_SBATCH_OPTIONS": f"--nodelist={node}",
            "SITE_LOG_DIR": str(self.folder / "logs"),
            **site,
        }
        done = subprocess.run(
            [ROOT / "jobs" / "submit.sh", *self.keys],
            env={**self.cluster.env, **self._environment(), **site},
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        arrays, _, finalize = done.stdout.partition(":  ")[0].partition(", then ")
        ids = [*arrays.split(":"), finalize.partition(":")[0]]
        self.arrays += ids[:-1]
        return ids

    def sbatch(self, node: str, *options: str, **site: str) -> str:
        """Without submit.sh, as one types it."""
        words = [
            *options,
            f"--nodelist={node}",
            f"--output={self.folder}/logs/%A_%a.out",
            f"--chdir={self.folder}",
        ]
        (self.folder / "logs").mkdir(exist_ok=True)
        script = ROOT / "jobs" / "generate.sbatch"
        array = self.cluster.submit(*words, script, *self.keys, **self._environment(), **site)
        self.arrays.append(array)
        return array

    def _environment(self) -> dict[str, str]:
        return {
            "PYTHONPATH": str(ROOT),
            "SITE_PYTHON": str(self.folder / "stub-python"),
            "SITE_SUBMIT_PYTHON": sys.executable,
            "SITE_NODE_DIR": str(self.folder / "node"),
            "STUB_ROW_S": str(self.row_s),
            "STUB_LOADS": str(self.folder / "loads"),
        }

    @property
    def rows(self) -> int:
        return committed_rows(self.output)

    @property
    def loads(self) -> list[str]:
        """Task and restart count of each that loaded the model."""
        path = self.folder / "loads"
        return path.read_text().splitlines() if path.exists() else []

    def log(self, task: str) -> str:
        (path,) = (self.folder / "logs").glob(f"*{task}.out")
        return path.read_text()

    def until_rows(self, rows: int) -> None:
        self.cluster.until(
            lambda: self.rows >= rows, _PATIENCE_S, f"{rows} rows are not there, {self.logs()}"
        )

    def until_over(self) -> None:
        self.cluster.until(
            lambda: all(self.cluster.is_over(array) for array in self.arrays),
            _PATIENCE_S,
            "the job is not over",
        )

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted((self.folder / "logs").glob("*")))

    def assert_complete(self) -> None:
        verdict = verify(self.output)
        assert verdict.complete, (verdict.problems, self.logs())
        assert verdict.num_results == self.num_rows and verdict.num_errors == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs on slurm")


@pytest.fixture(scope="module", autouse=True)
def out_of_time(slurm: SlurmCluster, folder: Path) -> Job:
    """One task in each launch style, whose time limit is shorter than the work there is for both."""
    job = Job(slurm, folder / "limited", num_rows=60, row_s=1.0)
    for launch in ("bare", "srun"):
        job.submit("n1", SITE_ARRAY_SIZE="1", SITE_TIME="1", SITE_SIGNAL_S="20", SITE_LAUNCH=launch)
    return job


@pytest.fixture(scope="module", autouse=True)
def on_a_lost_node(slurm: SlurmCluster, folder: Path) -> Job:
    """Two tasks on a node that goes dark, one on another."""
    job = Job(slurm, folder / "lost", num_rows=120, row_s=0.2)
    job.sbatch("n3", "--array=0-1")
    job.sbatch("n0", "--array=0-0")
    job.until_rows(10)
    slurm.lose_node("n3")
    return job


def test_an_array_with_a_task_requeued_and_one_cancelled(slurm: SlurmCluster, folder: Path) -> None:
    job = Job(slurm, folder / "array", num_rows=120, row_s=0.1)
    array, finalize = job.submit("n0", SITE_ARRAY_SIZE="4", SITE_ARRAY_LIMIT="2")
    job.until_rows(10)
    assert sorted(slurm.running(array)) == [f"{array}_0", f"{array}_1"]
    slurm.run("scontrol", "requeue", f"{array}_0")
    slurm.until(lambda: f"{array}_2" in slurm.running(array), 20, "the next task did not start")
    slurm.run("scancel", f"{array}_1")
    slurm.until(lambda: f"{array}_3" in slurm.running(array), 20, "the last task did not start")
    assert len(slurm.running(array)) <= 2
    job.until_over()
    assert slurm.job(f"{array}_0").restarts == 1
    assert slurm.job(f"{array}_1").state == "CANCELLED"
    for task in ("_0", "_1"):
        assert ENDED_BY_TERM.search(job.log(f"{array}{task}")), job.logs()
    job.assert_complete()

    slurm.until(lambda: slurm.is_over(finalize), 30, "finalize is not over")
    assert slurm.job(finalize).state == "COMPLETED", job.logs()
    rows = datasets.load_from_disk(str(job.output / "dataset"))
    assert rows["completion"] == [f"said {question} 0" for question in rows["prompt"]]
    assert len(rows) == job.num_rows


def test_tasks_that_find_nothing_to_do_load_no_model(slurm: SlurmCluster, folder: Path) -> None:
    job = Job(slurm, folder / "idle", num_rows=4, row_s=0.05)
    first = job.sbatch("n0", "--array=0-0")
    job.until_over()
    assert job.loads == ["0 0"]
    arrays = job.submit("n0", SITE_ARRAY_SIZE=str(MAX_ARRAY_SIZE + 2))
    assert len(arrays) == 3 and first not in arrays
    job.until_over()
    assert job.loads == ["0 0"]
    tasks = [task for array in arrays[:-1] for task in slurm.jobs(array)]
    assert [(task.state, task.fields["ExitCode"]) for task in tasks] == [("COMPLETED", "0:0")] * len(tasks)
    assert len(tasks) == MAX_ARRAY_SIZE + 2
    job.assert_complete()


def test_preempted_tasks_come_back(slurm: SlurmCluster, folder: Path) -> None:
    job = Job(slurm, folder / "preempted", num_rows=100, row_s=0.1)
    array = job.sbatch("n2", "--array=0-1")
    job.until_rows(10)
    urgent = slurm.submit(
        "--partition=urgent", "--nodelist=n2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    )
    slurm.until(lambda: slurm.is_over(urgent), 40, "the urgent job did not run")
    job.until_over()
    assert [task.restarts for task in slurm.jobs(array)] == [1, 1]
    assert len(ENDED_BY_TERM.findall(job.log(f"{array}_0"))) == 1, job.logs()
    job.assert_complete()


def test_a_node_that_is_lost_costs_no_row(slurm: SlurmCluster, on_a_lost_node: Job) -> None:
    job = on_a_lost_node
    on_lost, other = job.arrays
    slurm.until(lambda: slurm.is_over(other), _PATIENCE_S, "the survivor is not over")
    job.assert_complete()
    slurm.until(
        lambda: all(task.restarts for task in slurm.jobs(on_lost)), 60, "Slurm does not see that n3 is gone"
    )
    slurm.start_node("n3")
    job.until_over()
    # those that come back find nothing to do
    assert [line for line in job.loads if line.endswith(" 1")] == []
    assert {task.state for task in slurm.jobs(on_lost)} == {"COMPLETED"}
    job.assert_complete()


def test_a_task_whose_time_is_up_comes_back_until_the_job_is_complete(
    slurm: SlurmCluster, out_of_time: Job
) -> None:
    job = out_of_time
    job.until_over()
    for array in job.arrays:
        assert slurm.job(f"{array}_0").restarts >= 1, job.logs()
        assert f"{array}_0 comes back: restart 1 of at most 20" in job.log(f"{array}_0")
        assert slurm.job(f"{array}_0").state == "COMPLETED", job.logs()
    job.assert_complete()
