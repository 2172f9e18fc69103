"""Jobs that are killed, stopped, starved and broken, and go on with the same command.

Whatever ends a job, the results are those of a job that nothing ended, to the last byte.
"""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from real_jobs import (
    OWN_JOB,
    REPOSITORY,
    CommandServer,
    Ended,
    Running,
    committed_rows,
    files_under,
    write_questions,
)

import pipeline

pytestmark = [pytest.mark.faults, pytest.mark.slow]

NUM_ROWS = 400
DRAWN = (
    *OWN_JOB,
    "prompt.column=question",
    "sampling=diverse",
    "sampling.n=1",
    "sampling.max_tokens=60",
    "engine.max_num_seqs=16",
    "engine.max_num_batched_tokens=128",
    "engine.determinism=bitwise",
    "source.path=questions.parquet",
    "source.unit_rows=30",
    "output.commit_interval_s=0.02",
    "output.completion_ids=true",
)
# None of these may change a result; a job that goes on may go on with others.
OTHER_WAYS = (
    (),
    ("engine.mode=sync",),
    ("engine.max_num_seqs=7", "engine.max_num_batched_tokens=48"),
    ("engine.prefix_sharing=false", "output.max_part_bytes=2000"),
    ("engine.num_blocks=25", "engine.reserve=0", "prompt.prefetch_rows=3"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the input of all jobs here."""
    path = tmp_path_factory.mktemp("jobs")
    write_questions(path / "questions.parquet", NUM_ROWS)
    return path


@pytest.fixture(scope="module")
def undisturbed(commands: CommandServer, folder: Path) -> dict[str, bytes]:
    """Every file of the dataset of a job that nothing interrupted."""
    ended = commands.run(*job("undisturbed"), cwd=folder)
    assert ended.code == 0, ended.err
    return dataset_of(commands, folder, "undisturbed")


def job(name: str, *changes: str) -> list[str]:
    given = {change.split("=")[0] for change in changes}
    return [*(key for key in DRAWN if key.split("=")[0] not in given), f"output.dir={name}", *changes]


def dataset_of(commands: CommandServer, folder: Path, name: str) -> dict[str, bytes]:
    """Finalises a job, after `verify` has said that it is complete."""
    proof = commands.run(name, cwd=folder, verb="verify")
    assert (proof.code, proof.out[:9]) == (0, "complete:"), proof.out + proof.err
    ended = commands.run(name, "--format", "both", cwd=folder, verb="finalize")
    assert ended.code == 0, ended.err
    files = files_under(folder / name / "dataset")
    assert len(files) > 3
    return files


def completes(commands: CommandServer, folder: Path, name: str, *changes: str) -> Ended:
    ended = commands.run(*job(name, *changes), cwd=folder)
    assert ended.code == 0, ended.err
    return ended


class Killer:
    """Starts one job again and again and kills it each time, at one kind of moment or another."""

    def __init__(self, commands: CommandServer, folder: Path, name: str, seed: int) -> None:
        self._commands = commands
        self._folder = folder
        self._name = name
        self._random = random.Random(seed)
        # rows committed when each kill had landed
        self.landed: list[tuple[str, int]] = []

    @property
    def rows(self) -> int:
        return committed_rows(self._folder / self._name)

    def kill(self, moment: str, rows: int) -> None:
        """moment: the name of one of the methods below. rows: how many results shall be there by then."""
        code = getattr(self, f"_{moment}")(rows)
        assert code in (137, -signal.SIGKILL), f"{moment}: was over before the kill, with {code}"
        self.landed.append((moment, self.rows))

    def _arguments(self) -> list[str]:
        return job(self._name, *self._random.choice(OTHER_WAYS))

    def _import(self, rows: int) -> int:
        """While a Python of its own starts and imports; most of a start's time is this."""
        command = [sys.executable, "-m", "pipeline.run", *self._arguments()]
        environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
        with subprocess.Popen(
            command, cwd=self._folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            time.sleep(self._random.uniform(0, 2.5))
            process.kill()
            return process.wait()

    def _start(self, rows: int) -> int:
        """While it reads what is there and loads the model."""
        running = self._commands.start(*self._arguments(), cwd=self._folder)
        time.sleep(self._random.uniform(0, 0.45))
        running.send(signal.SIGKILL)
        return running.wait().code

    def _commit(self, rows: int) -> int:
        """In the midst of generating."""
        running = self._commands.start(*self._arguments(), cwd=self._folder)
        running.until(lambda: self.rows >= rows)
        time.sleep(self._random.uniform(0, 0.03))
        running.send(signal.SIGKILL)
        return running.wait().code

    def _disk(self, rows: int) -> int:
        """Right before one of the operations that make a record, a lease or a commit durable."""
        fault = {"kill_at_step": self._random.randint(30, 80)}
        return self._commands.run(*self._arguments(), cwd=self._folder, fault=fault).code

    def _close(self, rows: int) -> int:
        """In the close of a part, when the job was told to stop."""
        fault = {"kill_in_close": self._random.randrange(4)}
        arguments = [a for a in self._arguments() if "max_part_bytes" not in a]
        # Rows of its own: who has written nothing has nothing to close.
        wanted = max(rows, self.rows + 1)
        running = self._commands.start(*arguments, cwd=self._folder, fault=fault)
        running.until(lambda: self.rows >= wanted)
        running.send(signal.SIGTERM)
        return running.wait().code

    def _last_close(self, rows: int) -> int:
        """With every row committed, in the close that ends the job."""
        fault = {"kill_in_close": self._random.randrange(4)}
        return self._commands.run(*job(self._name), cwd=self._folder, fault=fault).code

    def _finalize(self, rows: int) -> int:
        fault = {"kill_at_step": self._random.randrange(12)}
        arguments = (self._name, "--format", "both")
        return self._commands.run(*arguments, cwd=self._folder, verb="finalize", fault=fault).code


def thirty_moments(random_: random.Random) -> Iterator[tuple[str, int]]:
    """From the first import to the last close and beyond it: each with the rows to be there by then."""
    working = ["commit"] * 11 + ["disk"] * 4 + ["close"] * 3 + ["start"] * 3 + ["import"] * 2
    random_.shuffle(working)
    yield from [("import", 0), ("start", 0), ("disk", 0)]
    for number, moment in enumerate(working):
        yield moment, 1 + (number * (NUM_ROWS - 60) + random_.randrange(NUM_ROWS)) // len(working)
    yield "last_close", NUM_ROWS
    yield from [("finalize", NUM_ROWS)] * 3


def test_thirty_kills_leave_the_bytes_of_a_job_that_was_left_alone(commands, folder, undisturbed):
    killer = Killer(commands, folder, "killed", seed=30)
    for moment, rows in thirty_moments(random.Random(30)):
        if moment == "finalize" and killer.landed[-1][0] == "last_close":
            completes(commands, folder, "killed")
        killer.kill(moment, rows)
    assert len(killer.landed) == 30
    progress = {rows for _, rows in killer.landed}
    assert len(progress) >= 15 and min(progress) == 0 and max(progress) == NUM_ROWS, killer.landed
    assert sum(0 < rows < NUM_ROWS for _, rows in killer.landed) >= 18, killer.landed
    assert len(list((folder / "killed" / "parts").iterdir())) >= 18
    assert dataset_of(commands, folder, "killed") == undisturbed


def rows_now(ended: Ended) -> int:
    """What the closing summary says of this process."""
    found = re.search(r"rows +([\d,]+) now", ended.out)
    assert found, ended.out + ended.err
    return int(found[1].replace(",", ""))


def has_finished(running: Running, num_rows: int) -> bool:
    done = re.findall(r"([\d,]+)/400 rows", running.err())
    return bool(done) and int(done[-1]) >= num_rows


def test_signals_end_a_job_soon_with_all_that_was_finished(commands, folder, undisturbed):
    # nothing is committed but by the signal
    quiet = ("output.commit_interval_s=1000", "report.interval_s=0.05")
    before = 0
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        running = commands.start(*job("stopped", *quiet), cwd=folder)
        assert running.until(partial(has_finished, running, before + 30))
        assert committed_rows(folder / "stopped") == before
        sent = time.monotonic()
        running.send(number)
        ended = running.wait(10)
        assert ended.code == 128 + number and time.monotonic() - sent < 5
        assert "Traceback" not in ended.err
        now = pipeline.open_parts(folder / "stopped").num_rows
        assert now - before == rows_now(ended) >= 30
        assert re.search(rf"stopped +by {number.name}\b", ended.out)
        assert f"{NUM_ROWS - now} to do" in ended.out and "the same command again" in ended.out
        before = now
    assert before < NUM_ROWS
    ended = completes(commands, folder, "stopped")
    assert rows_now(ended) == NUM_ROWS - before
    assert dataset_of(commands, folder, "stopped") == undisturbed


def test_a_second_interrupt_does_not_wait_for_a_step(commands, folder):
    running = commands.start(*job("hurried"), cwd=folder, fault={"slow_steps": 6.0})
    assert running.until(lambda: "in a step" in running.err())
    sent = time.monotonic()
    running.send(signal.SIGINT)
    time.sleep(0.3)
    assert not running.is_over()
    running.send(signal.SIGINT)
    ended = running.wait(20)
    assert ended.code == 130
    assert "the same command goes on" in ended.err and "Traceback" not in ended.err
    assert time.monotonic() - sent < 3


def test_a_signal_is_obeyed_while_every_row_is_filtered_out(commands, folder):
    write_questions(folder / "many.parquet", 60_000, row_group_size=1000)
    keys = ("source.path=many.parquet", 'source.filter="kind > 3"', "source.unit_rows=1000")
    running = commands.start(*job("filtered", *keys), cwd=folder)
    assert running.until(lambda: committed_rows(folder / "filtered") > 500)
    running.send(signal.SIGTERM)
    ended = running.wait(60)
    assert ended.code == 128 + signal.SIGTERM
    assert committed_rows(folder / "filtered") < 60_000


def test_a_spent_budget_stops_with_75_and_more_money_goes_on(commands, folder, undisturbed):
    price = "cost.gpu_hour_usd=3600"  # a dollar a second
    ended = commands.run(*job("budget", price, "cost.max_usd=1.2"), cwd=folder)
    assert ended.code == 75, ended.err
    now = committed_rows(folder / "budget")
    assert 0 < now == rows_now(ended) < NUM_ROWS
    assert re.search(r"stopped +cost\.max_usd=\$1\.20 is spent: raise it", ended.out)
    completes(commands, folder, "budget", price, "cost.max_usd=1000")
    assert dataset_of(commands, folder, "budget") == undisturbed


def test_a_model_that_fails_in_midst_of_a_job_costs_no_finished_row(commands, folder, undisturbed):
    for step, mode in ((60, "async"), (90, "sync")):
        before = committed_rows(folder / "failing")
        changes = (f"engine.mode={mode}", "output.commit_interval_s=1000")
        ended = commands.run(*job("failing", *changes), cwd=folder, fault={"step_fails": step})
        assert ended.code == 1
        assert "the step failed on purpose" in ended.err
        assert ended.err.rstrip().endswith("unexpected RuntimeError; finished rows are kept")
        assert committed_rows(folder / "failing") > before
    assert committed_rows(folder / "failing") < NUM_ROWS
    completes(commands, folder, "failing")
    assert dataset_of(commands, folder, "failing") == undisturbed


def assert_tells_of_a_full_disk(ended: Ended, name: str) -> None:
    assert ended.code == 1
    assert "Traceback" not in ended.err
    assert f"output.dir={name}" in ended.err and "No space left on device" in ended.err
    assert "start the same command again" in ended.err


@pytest.mark.parametrize("num_bytes", [0, 100, 5000, 20_000, 40_000])
def test_a_disk_that_is_full_for_a_while(commands, folder, undisturbed, num_bytes):
    name = f"full-{num_bytes}"
    ended = commands.run(*job(name), cwd=folder, fault={"disk_of": num_bytes})
    assert_tells_of_a_full_disk(ended, name)
    if num_bytes == 40_000:
        assert 0 < committed_rows(folder / name) < NUM_ROWS
        completes(commands, folder, name)
        assert dataset_of(commands, folder, name) == undisturbed


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 120 kB, of which each small file takes 4."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_small_disk(commands, folder, undisturbed, small_disk):
    name = str(small_disk / "job")
    ended = commands.run(*job(name), cwd=folder)
    assert_tells_of_a_full_disk(ended, name)
    assert 0 < committed_rows(Path(name)) < NUM_ROWS
    again = commands.run(*job(name), cwd=folder)
    assert again.code == 1 and "No space left on device" in again.err and "Traceback" not in again.err
    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    completes(commands, folder, name)
    assert dataset_of(commands, folder, name) == undisturbed
