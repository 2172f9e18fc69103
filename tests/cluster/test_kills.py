"""Processes that are killed, starved and stopped at named points, alone and four on one directory.

The command line, the job and the files are the real ones; only the model is missing. Each chain of lives
goes on until the job is complete, and ends with the bytes of a job that nothing disturbed.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cluster.stub_server import FINALIZE_POINTS, POINTS, Running, StubServer
from real_jobs import files_under

from pipeline.output.finalize import finalize
from pipeline.output.progress import JobDirectory
from pipeline.output.verify import verify

pytestmark = [pytest.mark.faults, pytest.mark.slow]

NUM_ROWS = 48
NUM_KILLS = 44
NUM_KILLS_LARGE = 1000
JOB = (
    "source=parquet",
    "prompt.column=question",
    "source.unit_rows=6",
    "sampling.n=2",
    "output.commit_interval_s=0",
    # a rename of a record at every look of the others
    "cluster.heartbeat_s=0.05",
    "cluster.lease_s=5",
    "cluster.poll_s=0.05",
)
SMALL_PARTS = "output.max_part_bytes=3000"


@pytest.fixture(scope="module")
def server() -> Iterator[StubServer]:
    with StubServer() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kills")
    questions = [f"question {number}" for number in range(NUM_ROWS)]
    pq.write_table(pa.table({"question": questions}), path / "rows.parquet", row_group_size=20)
    return path


@pytest.fixture(scope="module")
def calm(server: StubServer, folder: Path) -> dict[str, bytes]:
    """The dataset of a job that nothing disturbed."""
    running = start(server, folder, "calm")
    assert running.wait() == 0, running.err
    return dataset_of(folder / "calm")


def start(server: StubServer, folder: Path, name: str, *changes: str, **options) -> Running:
    place = (f"source.path={folder}/rows.parquet", f"output.dir={folder}/{name}")
    given = {change.split("=")[0] for change in changes}
    return server.start(*(key for key in JOB if key.split("=")[0] not in given), *place, *changes, **options)


def dataset_of(job: Path) -> dict[str, bytes]:
    proof = verify(job)
    assert proof.complete, proof.problems
    finalize(job)
    return files_under(job / "dataset")


@dataclass
class Chain:
    """Lives on one directory, each killed at a point that is drawn, until the job is complete."""

    server: StubServer
    folder: Path
    name: str
    chance: random.Random
    num_workers: int
    hits: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        while not self._is_complete():
            lives = [self._start() for _ in range(self.num_workers)]
            for life in lives:
                self._judge(life, life.wait())
        self._finalize_killed()

    def _start(self) -> Running:
        # rare points first, the others come by themselves
        point = min(self.chance.sample(sorted(POINTS), 3), key=lambda name: self.hits[name])
        rolls = "roll-over" in point or self.chance.random() < 0.3
        options = (SMALL_PARTS,) if rolls else ()
        row_s = 0.002 if self.num_workers > 1 else 0.0
        nth = self.chance.choice((1, 1, 2, 3, 6))
        return start(self.server, self.folder, self.name, *options, row_s=row_s, fault={"kill": (point, nth)})

    def _judge(self, life: Running, code: int) -> None:
        if life.hit is not None:
            assert code == -signal.SIGKILL, life.err
            self.hits[life.hit] += 1
        else:
            # done, or what is left was with others when it looked
            assert code == 0, life.err

    def _finalize_killed(self) -> None:
        point = min(sorted(FINALIZE_POINTS), key=lambda name: (self.hits[name], self.chance.random()))
        life = self.server.start(str(self.folder / self.name), verb="finalize", fault={"kill": (point, 1)})
        self._judge(life, life.wait())
        assert life.hit == point, f"{point} was never reached: {life.err}"

    def _is_complete(self) -> bool:
        path = self.folder / self.name
        if not (path / "job.json").exists():
            return False
        directory = JobDirectory.load(path)
        return directory.stored().ledger.num_results == directory.num_results


def killed(
    server: StubServer, folder: Path, calm: dict[str, bytes], kills: int, workers: int
) -> Counter[str]:
    """Chains of lives until so many were killed."""
    hits: Counter[str] = Counter()
    number = 0
    while hits.total() < kills:
        chain = Chain(server, folder, f"job-{workers}-{number}", random.Random(number), workers, hits)
        chain.run()
        assert dataset_of(folder / chain.name) == calm
        number += 1
    return hits


@pytest.mark.parametrize("workers", [1, 4])
def test_kills_leave_the_bytes_of_a_job_that_was_left_alone(server, folder, calm, workers):
    hits = killed(server, folder, calm, NUM_KILLS // 2, workers)
    assert len(hits) >= 10, hits


@pytest.mark.large
def test_a_thousand_kills(server, folder, calm):
    hits = killed(server, folder, calm, NUM_KILLS_LARGE // 2, 1)
    hits += killed(server, folder, calm, NUM_KILLS_LARGE // 2, 4)
    for name in (*POINTS, *FINALIZE_POINTS):
        print(f"{hits[name]:5} {name}")
    assert set(hits) == {*POINTS, *FINALIZE_POINTS} and hits.total() >= NUM_KILLS_LARGE


def test_a_disk_that_is_full_at_any_write_loses_nothing(server, folder):
    # the command line names more settings than these jobs have, and so the bytes are others
    assert start(server, folder, "roomy", verb="run").wait() == 0
    chance, number_full = random.Random(3), 0
    for _ in range(6):
        # through the command line, which has to say it in a sentence
        full = {"full": chance.randint(1, 60)}
        life = start(server, folder, "full", SMALL_PARTS, fault=full, verb="run")
        code = life.wait()
        if life.hit is None:
            assert code == 0, life.err
            continue
        number_full += 1
        assert code != 0 and "No space left" in life.err and "Traceback" not in life.err, life.err
    assert number_full >= 4
    assert start(server, folder, "full", verb="run").wait() == 0
    assert dataset_of(folder / "full") == dataset_of(folder / "roomy")


def test_a_worker_stopped_past_its_lease_cannot_spoil_what_another_made(server, folder, calm):
    short = ("cluster.heartbeat_s=0.1", "cluster.lease_s=0.5", "cluster.poll_s=0.1")
    stopped = start(server, folder, "stopped", *short, row_s=0.03)
    wait_for(lambda: committed(folder / "stopped") > 5)
    stopped.send(signal.SIGSTOP)
    heir = start(server, folder, "stopped", *short)
    assert heir.wait() == 0 and committed(folder / "stopped") == NUM_ROWS * 2, heir.err
    assert "others" not in heir.err
    stopped.send(signal.SIGCONT)
    assert stopped.wait() == 0, stopped.err
    assert dataset_of(folder / "stopped") == calm


@pytest.mark.parametrize("seconds", [-1e8, -3600.0, 3600.0, 1e8])
def test_a_jump_of_the_wall_clock_decides_nothing(server, folder, calm, seconds):
    name = f"clock{seconds:.0f}"
    lives = [start(server, folder, name, row_s=0.01, fault={"jump": jump}) for jump in (seconds, 0.0)]
    assert [life.wait() for life in lives] == [0, 0], [life.err for life in lives]
    assert dataset_of(folder / name) == calm
    ledger = JobDirectory.load(folder / name).stored().ledger
    # nobody was taken for dead, so nothing was made twice
    assert sum(ref.rows for ref in ledger.all_commits()) == NUM_ROWS * 2


def committed(job: Path) -> int:
    if not (job / "job.json").exists():
        return 0
    return JobDirectory.load(job).stored().ledger.num_results


def wait_for(happened) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)
