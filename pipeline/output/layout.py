"""What lies where in a job directory.

job.json                the plan of the job and its fingerprint
input.arrow             the index of the input, so that a resumed job need not scan again
parts/I-00000.arrow     rows of incarnation I, append-only
journal/I-00000.jsonl   what of that part counts
leases/00000/U.F        who holds unit U, by fence F
workers/I.json          how incarnation I is, replaced every few seconds
published/              finished ranges of units as shards, made by `finalize --rolling` while the job runs
dataset/                made by `finalize`
timeline/W.json         a window of worker W's steps, and W.png its picture, if engine.timeline asked for it

A worker keeps its name over restarts; an incarnation is one process's life.
In a remote store a part and a journal are folders of objects, which in order are the file (`stores`).
"""

from __future__ import annotations

from pathlib import Path

from pipeline.store import Store, open_store

JOB_FILE = "job.json"
INPUT_FILE = "input.arrow"
PARTS = "parts"
JOURNAL = "journal"
LEASES = "leases"
WORKERS = "workers"
DATASET = "dataset"
PUBLISHED = "published"
# Who holds units whose rows were published: nobody takes these over any more.
PUBLISHED_HOLDER = "published"
TIMELINE = "timeline"
_PART_SUFFIX = ".arrow"
_JOURNAL_SUFFIX = ".jsonl"
_RECORD_SUFFIX = ".json"
# Leases of so many units share a folder.
UNITS_PER_FOLDER = 4096


def part_path(job: Path, name: str) -> Path:
    return job / PARTS / f"{name}{_PART_SUFFIX}"


def journal_path(job: Path, name: str) -> Path:
    return job / JOURNAL / f"{name}{_JOURNAL_SUFFIX}"


def lease_path(job: Path, unit: int, fence: int) -> Path:
    return job / LEASES / f"{unit // UNITS_PER_FOLDER:05d}" / f"{unit:08d}.{fence}"


def record_path(job: Path, incarnation: str) -> Path:
    return job / WORKERS / f"{incarnation}{_RECORD_SUFFIX}"


def part_names(job: Path, store: Store | None = None) -> list[str]:
    """Names of all parts that have a file, sorted."""
    return _stems(store or open_store(job), job / PARTS, _PART_SUFFIX)


def journal_names(job: Path, store: Store | None = None) -> list[str]:
    """Names of all parts that have a journal, sorted."""
    return _stems(store or open_store(job), job / JOURNAL, _JOURNAL_SUFFIX)


def incarnations(job: Path, store: Store | None = None) -> list[str]:
    """All that have a worker record, sorted."""
    return _stems(store or open_store(job), job / WORKERS, _RECORD_SUFFIX)


def part_name(incarnation: str, seq: int) -> str:
    return f"{incarnation}-{seq:05d}"


def split_part_name(name: str) -> tuple[str, int]:
    """(incarnation, seq). Raises ValueError for a name that is not ours."""
    incarnation, _, seq = name.rpartition("-")
    if not incarnation or not seq.isdigit():
        raise ValueError(f"{name} is no name of a part")
    return incarnation, int(seq)


def _stems(store: Store, folder: Path, suffix: str) -> list[str]:
    return sorted(name.removesuffix(suffix) for name in store.names(folder) if name.endswith(suffix))
