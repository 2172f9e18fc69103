"""launcher=local: several worker processes behind one command line. Real processes, no model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from real_jobs import write_questions

from pipeline import open_parts
from pipeline.cluster.local_workers import visible_gpus
from pipeline.config import (
    CostConfig,
    Device,
    JobConfig,
    LauncherConfig,
    LauncherKind,
    ModelConfig,
    ParquetSource,
    PromptConfig,
)
from pipeline.launcher import exit_code, worker_commands
from pipeline.output.layout import incarnations
from pipeline.status import status

STUB = Path(__file__).with_name("stub_run.py")
NUM_ROWS = 48
_PATIENCE_S = 60.0


@dataclass
class Launched:
    """A launcher at work on a job of 48 rows."""

    folder: Path
    row_s: float = 0.01
    num_workers: int = 3
    keys: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        write_questions(self.folder / "rows.parquet", NUM_ROWS)
        self.output = self.folder / "out"
        words = [
            *(sys.executable, str(STUB), "-m", "pipeline.run", "launcher=local"),
            f"launcher.num_workers={self.num_workers}",
            *("conf=generate", "source=parquet", "source.path=rows.parquet", "source.unit_rows=4"),
            *("prompt.column=question", "model.path=none", "model.device=cpu", "output.dir=out"),
            *("cluster.heartbeat_s=0.2", "cluster.lease_s=30", "cluster.poll_s=0.1"),
            *("output.commit_interval_s=0.1", "report.interval_s=0.3", *self.keys),
        ]
        loads = {"STUB_LOADS": str(self.folder / "loads"), "STUB_ROW_S": str(self.row_s)}
        self.process = subprocess.Popen(
            words,
            cwd=self.folder,
            env={**os.environ, **loads, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str, str]:
        out, errors = self.process.communicate(timeout=_PATIENCE_S)
        return self.process.returncode, out, errors

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def records(self) -> list[dict]:
        folder = self.output / "workers"
        return [json.loads((folder / f"{name}.json").read_text()) for name in incarnations(self.output)]

    def all_at_work(self) -> bool:
        return len(at_work := self.records()) == self.num_workers and all(
            record["rows"] for record in at_work
        )

    def pids(self) -> list[int]:
        return [record["process"]["pid"] for record in self.records()]

    def rows(self) -> list[tuple[int, int]]:
        table = open_parts(self.output).to_table().select(["file", "row"])
        return sorted(tuple(row.values()) for row in table.to_pylist())


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(**options: object) -> Launched:
        started.append(Launched(tmp_path, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.communicate()


def test_three_workers_share_the_job(launch):
    job = launch(row_s=0.03, environment={"OMP_NUM_THREADS": "5"})
    code, out, errors = job.end()
    assert code == 0, errors
    assert job.rows() == [(0, row) for row in range(NUM_ROWS)]
    names = [record["worker"] for record in job.records()]
    assert len(set(names)) == 3 and all(name.endswith(f"-w{i}") for i, name in enumerate(sorted(names)))
    # each of them loaded the model, and the launcher did not
    assert len((job.folder / "loads").read_text().splitlines()) == 3
    assert {path.stem for path in (job.output / "logs").iterdir()} == set(names)
    assert out.count("results   48 of 48") == 1 and "3 ended" in out
    assert out.count("tokenmill verify") == 1
    # one line of progress for all, and nothing of what each would print alone
    assert re.search(r"^\d+/48 rows \(\d+%\), .* tokens/s, 3 workers", errors, re.M)
    assert "first prompt" not in errors and "KV" not in errors
    log = next((job.output / "logs").iterdir()).read_text()
    assert "48" in log and "Traceback" not in log


def test_a_dead_worker_is_named_and_the_others_finish(launch):
    job = launch(row_s=0.05)
    job.wait(job.all_at_work)
    victim = job.records()[1]
    os.kill(victim["process"]["pid"], signal.SIGKILL)
    code, out, errors = job.end()
    assert code == 0, errors
    assert job.rows() == [(0, row) for row in range(NUM_ROWS)]
    assert errors.count(f"worker {victim['worker']} was killed by SIGKILL; the others go on") == 1
    # and was not started again
    assert len(job.records()) == 3
    assert "2 ended" in out and "1 stale" in out


def test_a_signal_stops_all_of_them_and_the_slurm_task_is_asked_back_once(launch):
    slurm = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "9"}
    job = launch(row_s=0.3, num_workers=2, keys=("cluster.requeue=exit_code",), environment=slurm)
    job.wait(job.all_at_work)
    state = status(job.output)
    assert [(worker.name, worker.state.value) for worker in state.workers] == [
        (f"7_2-w{number}", "running") for number in range(2)
    ]
    assert state.hours.useful > 0 and state.hours.loading > 0 and state.hours.redone == 0
    job.process.send_signal(signal.SIGUSR1)
    code, out, errors = job.end()
    assert code == 85
    assert errors.count("7_2 comes back: restart 1 of at most 20") == 1
    # whoever did as told is no news
    assert "ended with" not in errors and "killed" not in errors
    assert all(record["ended"] == "done" for record in job.records())
    done = job.rows()
    assert 2 <= len(done) == len(set(done)) < NUM_ROWS
    assert "stopped   start the same command again" in out and "go on" in out


def test_the_second_interrupt_ends_all_at_once(launch):
    # one that hangs does not notice the first
    job = launch(row_s=0.05, num_workers=2)
    job.wait(job.all_at_work)
    pids = job.pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, _, errors = job.end()
    assert code == 130 and time.monotonic() - began < 10
    assert "by SIGKILL" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_workers_do_not_outlive_a_launcher_that_is_killed(launch):
    job = launch(row_s=0.3, num_workers=2)
    job.wait(job.all_at_work)
    pids = job.pids()
    job.process.kill()
    deadline = time.monotonic() + _PATIENCE_S
    while any(record["ended"] is None for record in job.records()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # told by TERM, so that they left in order
    assert len(job.rows()) >= 2 and len(pids) == 2


def test_a_wrong_setting_is_said_once_and_nobody_is_started_again(launch):
    job = launch(keys=("source.filter='}{'", "source.path=nowhere.parquet"))
    code, out, errors = job.end()
    assert code == 1 and out == ""
    assert errors.count("nowhere.parquet") == 1, errors
    assert errors.count("ended with exit code 1") == 3
    assert errors.count("for the same reason") == 2
    assert not (job.folder / "loads").exists()


def test_a_mistyped_key_starts_nobody(launch):
    job = launch(keys=("launcher.workers=3",))
    code, _, errors = job.end()
    assert code == 1 and "launcher.workers is not a key" in errors
    assert not (job.output / "logs").exists()


# ---------------------------------------------------------------- without processes


def config(**launcher: object) -> JobConfig:
    return JobConfig(
        source=ParquetSource(path="rows.parquet"),
        prompt=PromptConfig(column="question"),
        model=ModelConfig(path="none", device=launcher.pop("device", Device.auto)),  # type: ignore[arg-type]
        cost=CostConfig(max_usd=launcher.pop("max_usd", None)),  # type: ignore[arg-type]
        launcher=LauncherConfig(kind=LauncherKind.local, **launcher),  # type: ignore[arg-type]
    )


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list]:
    monkeypatch.setattr("pipeline.launcher._command_line", lambda: ["python", "-m", "pipeline.run"])

    def make(environment: dict[str, str], **launcher: object) -> list:
        return worker_commands(config(**launcher), Path("logs"), environment)

    return make


def test_each_worker_sees_one_gpu(commands):
    made = commands({"CUDA_VISIBLE_DEVICES": "3,GPU-ab,5", "HYDRA_FULL_ERROR": "1"})
    assert [command.environment["CUDA_VISIBLE_DEVICES"] for command in made] == ["3", "GPU-ab", "5"]
    assert len({command.name for command in made}) == len({command.log for command in made}) == 3
    assert all("HYDRA_FULL_ERROR" not in command.environment for command in made)
    two = commands({"CUDA_VISIBLE_DEVICES": "3,4,5"}, num_workers=2)
    assert [command.environment["CUDA_VISIBLE_DEVICES"] for command in two] == ["3", "4"]


def test_cores_are_shared_out_unless_somebody_did(commands):
    made = commands({"CUDA_VISIBLE_DEVICES": ""}, num_workers=2)
    expected = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert [int(command.environment["OMP_NUM_THREADS"]) for command in made] == [expected] * 2
    assert (
        "CUDA_VISIBLE_DEVICES"
        not in commands({"OMP_NUM_THREADS": "7"}, num_workers=1, device=Device.cpu)[0].environment
    )
    made = commands({"OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": ""}, num_workers=1)
    assert made[0].environment["OMP_NUM_THREADS"] == "7"


def test_a_budget_is_that_of_all(commands):
    (words, *_) = [command.words for command in commands({"CUDA_VISIBLE_DEVICES": "0,1"}, max_usd=5.0)]
    assert list(words[-3:]) == ["launcher.kind=none", "cluster.requeue=never", "cost.max_usd=2.5"]


@pytest.mark.parametrize(
    "visible, options, message",
    [
        ("", {}, "launcher.num_workers=2 starts two"),
        ("0", {"num_workers": 2}, "launcher.num_workers=2 is more than the 1 visible"),
        ("", {"device": Device.cuda, "num_workers": 1}, "model.device=cuda"),
    ],
)
def test_numbers_that_cannot_be_are_refused(commands, visible, options, message):
    with pytest.raises(ValueError, match=message):
        commands({"CUDA_VISIBLE_DEVICES": visible}, **options)


def test_visible_gpus_are_read_as_cuda_does(tmp_path, monkeypatch):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": " 1, GPU-8a,-1,2"}) == ["1", "GPU-8a"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == []
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-1)'; echo 'GPU 1: H200 (UUID: GPU-2)'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert visible_gpus({}) == ["0", "1"]
    smi.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert visible_gpus({}) == []


@pytest.mark.parametrize(
    "codes, received, complete, expected",
    [
        ([0, 0], None, False, 0),
        ([137, 0], None, True, 0),
        ([137, 0], None, False, 137),
        ([75, 0], None, False, 75),
        ([85, 85], None, False, 75),
        ([75, 137], None, False, 137),
        ([1, 137, 75], None, False, 1),
        ([138, 0], signal.SIGUSR1, False, 138),
        ([138, 1], signal.SIGUSR1, False, 1),
        ([], signal.SIGTERM, False, 143),
    ],
)
def test_one_exit_code_for_all(codes, received, complete, expected):
    assert exit_code(codes, received, complete) == expected
