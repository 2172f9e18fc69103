"""Jobs on an object store: workers that are killed, a server that goes away, and each row once in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_jobs import FakeSource, Worker, complete, plan
from fsspec.implementations.memory import MemoryFileSystem
from s3_server import CutOff, Overloaded, S3Server

from pipeline import finalize, status, verify
from pipeline.output.layout import journal_names, part_names, part_path
from pipeline.output.ledger import Ledger
from pipeline.output.progress import JobDirectory
from pipeline.output.reader import open_parts
from pipeline.stores.patience import StoreUnreachable
from pipeline.stores.remote import RemoteStore

STUB = Path(__file__).parent / "stub_run.py"
NUM_ROWS = 80
NUM_OVERLOADED = 6
DEADLINE_S = 90.0


class Faults:
    """Kills the first worker that is about to write its second commit's line; then is overloaded a while."""

    def __init__(self, pids: dict[int, subprocess.Popen[str]]) -> None:
        self.killed: int | None = None
        self.unsaid: str | None = None
        self.num_overloaded = 0
        self._pids = pids
        self._num_lines: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, method: str, key: str) -> None:
        with self._lock:
            if method == "PUT" and "/journal/" in key:
                self._line(key)
            elif self.killed is not None and self.num_overloaded < NUM_OVERLOADED:
                self.num_overloaded += 1
                raise Overloaded

    def _line(self, key: str) -> None:
        name = key.split("/journal/")[1].split("/")[0]
        self._num_lines[name] += 1
        # header, first commit, second commit
        if self.killed is None and self._num_lines[name] == 3:
            self.killed = next(pid for pid in self._pids if f"-{pid}." in name)
            self.unsaid = name.removesuffix(".jsonl")
            os.kill(self.killed, signal.SIGKILL)
            raise CutOff


def run(arguments: list[str], tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(STUB), "-m", "pipeline.run", *arguments],
        env={
            **os.environ,
            "STUB_ROW_S": "0.02",
            "STUB_LOADS": str(tmp_path / "loads"),
            "PYTHONPATH": str(STUB.parents[2]),
            **environment,
        },
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.faults
def test_two_workers_on_s3_one_killed_between_its_rows_and_their_line(
    s3: S3Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = pa.table({"prompt": [f"prompt {number}" for number in range(NUM_ROWS)]})
    with s3.files.open(f"{s3.bucket}/in/rows.parquet", "wb") as file:
        pq.write_table(rows, file, row_group_size=30)
    url = f"s3://{s3.bucket}/jobs/one"
    arguments = [
        *("conf=generate", "source=parquet", f"source.path=s3://{s3.bucket}/in/*.parquet"),
        *("source.unit_rows=20", "prompt.column=prompt", "model=tiny", f"output.dir={url}"),
        *("output.upload_interval_s=0.2", f"output.stage_dir={tmp_path}/stage", "cluster.poll_s=0.2"),
    ]
    started = [run(arguments, tmp_path) for _ in range(2)]
    workers = {worker.pid: worker for worker in started}
    s3.watch = faults = Faults(workers)
    try:
        texts = {pid: worker.communicate(timeout=DEADLINE_S)[0] for pid, worker in workers.items()}
    finally:
        for worker in started:
            worker.kill()
    assert faults.killed is not None and faults.num_overloaded == NUM_OVERLOADED
    codes = {pid: worker.returncode for pid, worker in workers.items()}
    assert codes.pop(faults.killed) == -signal.SIGKILL
    assert set(codes.values()) == {0}, texts

    # the rows that the dead worker sent up and never spoke of are there, and count for nothing
    job, name = JobDirectory.load(url), faults.unsaid
    ledger = Ledger.read(job.path)
    committed = next(part.committed for part in ledger.parts if part.header.part == name)
    assert job.store.size(part_path(job.path, name)) > committed
    prompts = open_parts(url).to_table().column("prompt").to_pylist()
    assert sorted(prompts) == sorted(rows.column("prompt").to_pylist())

    assert verify.main([url]) == 0
    assert finalize.main([url]) == 0
    assert verify.main([url]) == 0
    assert status.main([url, "--json"]) == 0
    out = capsys.readouterr().out
    assert f"{NUM_ROWS} results" in out and "finalised dataset equal" in out
    assert json.loads(out.splitlines()[-1])["num_done"] == NUM_ROWS
    assert f"{url}/dataset" in out and str(tmp_path) not in out
    dataset = datasets.load_from_disk(f"{url}/dataset", storage_options=s3.options)
    assert list(dataset["prompt"]) == rows.column("prompt").to_pylist()
    # of all that was staged nothing is left but each worker's record of its settings
    left = [path for path in (tmp_path / "stage").rglob("*") if path.is_file()]
    assert left and all("hydra" in path.parts for path in left)


class Away(MemoryFileSystem):
    """A store that refuses to take objects whose names have something in them, for as long as wanted."""

    cachable = False
    refused: str | None = None

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: object) -> None:
        if self.refused is not None and self.refused in path:
            raise ConnectionError("made up")
        super().pipe_file(path, value, mode=mode, **kwargs)


class Remote:
    """A job of 32 rows in the memory of fsspec, and its workers in one thread."""

    def __init__(self, stage: Path) -> None:
        self.filesystem = Away()
        self.path = Path(f"memory://{stage.name}")
        self._stage = stage
        self.source = FakeSource()
        self.plan = plan(self.source)

    def worker(self, name: str) -> Worker:
        store = RemoteStore(self.filesystem, self._stage, patience_s=0.0)
        directory = JobDirectory.open(self.path, self.plan, self.source.scan(), store=store)
        return Worker.on(directory, self.source, name)

    def finish(self, worker: Worker) -> list[int]:
        """Makes all that is left; the ordinals."""
        made = []
        for row, sample in worker.rows():
            assert worker.writer.append(complete(row, sample))
            made.append(row.ordinal)
        worker.writer.close()
        return made


@pytest.mark.parametrize("refused", ["/parts/", "/journal/"])
def test_a_store_that_stays_away_stops_the_worker_and_leaves_what_was_committed(
    refused: str, tmp_path: Path
) -> None:
    remote = Remote(tmp_path)
    worker, safe = remote.worker("w0"), list[int]()
    for number, (row, sample) in enumerate(worker.rows()):
        assert worker.writer.append(complete(row, sample))
        if number < 6:
            worker.writer.commit()
            safe.append(row.ordinal)
        if number == 8:
            break
    remote.filesystem.refused = refused
    with pytest.raises(StoreUnreachable, match="What was committed is safe"):
        worker.writer.commit()
    # the store answers again, but of that commit nobody knows how much of it is there
    remote.filesystem.refused = None
    worker.writer.close()
    again = remote.finish(remote.worker("w1"))
    assert sorted(safe + again) == list(range(32))
    parts = open_parts(remote.path)
    assert parts.num_rows == 32 and parts.to_table().num_rows == 32
    assert part_names(remote.path) == journal_names(remote.path)


def test_a_job_on_objects_gives_the_rows_of_a_job_on_files(tmp_path: Path) -> None:
    remote = Remote(tmp_path)
    remote.finish(remote.worker("w0"))
    local = JobDirectory.open(tmp_path / "job", remote.plan, remote.source.scan())
    worker = Worker.on(local, remote.source, "w0")
    for row, sample in worker.rows():
        worker.writer.append(complete(row, sample))
    worker.writer.close()
    ours, theirs = (JobDirectory.load(path) for path in (remote.path, tmp_path / "job"))
    (name,) = part_names(remote.path)
    assert ours.store.read(part_path(ours.path, name)) == part_path(theirs.path, name).read_bytes()
    assert ours.plan.encode() == theirs.plan.encode() and ours.index == theirs.index
