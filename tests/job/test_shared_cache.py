"""Sixty-four workers start at once and read one hub cache: none writes to it.

The cache stands for the one on a cluster's shared file system; the environment is what jobs/launch.sh gives a
task. Each worker reads what a job reads from the hub: configuration, tokenizer, weights, rows. One process
imports what that takes and forks them all, so that they begin in the same moment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs.fake_slurm import FakeSlurm
from real_jobs import REPOSITORY, TINY_MODEL

NUM_WORKERS = 64
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# The dataset as prefetch leaves it.
_LOGIN_NODE = """
import datasets
from pipeline.config import HFSource
from pipeline.input.source import open_source

datasets.disable_progress_bars()
open_source(HFSource(path="data")).scan()
"""
_WORKERS = """
import os, sys
import datasets
from pipeline.config import HFSource, ModelConfig
from pipeline.input.source import open_source
from pipeline.models.load import inspect_model, load_model, load_tokenizer

datasets.disable_progress_bars()

def load(path):
    inspected = inspect_model(ModelConfig(path=path))
    model = load_model(inspected.config, load_tokenizer(inspected.config), inspected)
    assert next(model.model.parameters()).isfinite().all()

def work():
    load("org/tiny")
    source = open_source(HFSource(path="data"))
    (file,) = source.scan().files
    assert file.num_rows == 96

# What transformers prepares at the first model of a process, it has then prepared for all.
load("{local}")
wait, go = os.pipe()
pids = []
for _ in range({count}):
    pids.append(os.fork())
    if not pids[-1]:
        os.close(go)
        os.read(wait, 1)
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
os.close(go)
print(sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in pids))
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A model in the hub's layout, as prefetch leaves it."""
    home = tmp_path / "shared"
    repository = home / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(TINY_MODEL, repository / "snapshots" / COMMIT)
    return home


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder with its size and the time of its last change."""
    found = [folder, *folder.rglob("*")]
    return {str(path): (path.lstat().st_size, path.lstat().st_ctime_ns) for path in found}


def test_no_worker_writes_to_the_shared_cache(tmp_path: Path, shared: Path) -> None:
    (tmp_path / "data").mkdir()
    rows = pa.table({"question": [f"Compute {i} + 1." for i in range(96)]})
    pq.write_table(rows, tmp_path / "data" / "train.parquet")
    (tmp_path / "task").mkdir()
    task = FakeSlurm(tmp_path / "task")
    task.env |= {"HF_HOME": str(shared), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", _LOGIN_NODE], cwd=tmp_path, env=task.env, check=True)
    for lock in shared.rglob("*.lock"):
        lock.unlink()  # so that whoever locks there shows
    before = state(shared)
    assert any("datasets" in name and name.endswith(".arrow") for name in before)

    task.task("generate.sbatch")
    workers = [sys.executable, "-c", _WORKERS.format(count=NUM_WORKERS, local=TINY_MODEL)]
    done = subprocess.run(
        workers, cwd=tmp_path, env=task.seen()[0].env, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == [str(NUM_WORKERS)], done.stderr[-3000:]
    assert state(shared) == before
