"""What lies where in a job directory.

job.json                the plan of the job and its fingerprint
input.arrow             the index of the input, so that a resumed job need not scan again
parts/W-00000.arrow     rows of worker W, append-only
journal/W-00000.jsonl   what of that part counts
dataset/                made by `finalize`
timeline/W.json         a window of worker W's steps, and W.png its picture, if engine.timeline asked for it
"""

from __future__ import annotations

from pathlib import Path

JOB_FILE = "job.json"
INPUT_FILE = "input.arrow"
PARTS = "parts"
JOURNAL = "journal"
DATASET = "dataset"
TIMELINE = "timeline"
_PART_SUFFIX = ".arrow"
_JOURNAL_SUFFIX = ".jsonl"


def part_path(job: Path, name: str) -> Path:
    return job / PARTS / f"{name}{_PART_SUFFIX}"


def journal_path(job: Path, name: str) -> Path:
    return job / JOURNAL / f"{name}{_JOURNAL_SUFFIX}"


def part_names(job: Path) -> list[str]:
    """Names of all parts that have a file, sorted."""
    return _stems(job / PARTS, _PART_SUFFIX)


def journal_names(job: Path) -> list[str]:
    """Names of all parts that have a journal, sorted."""
    return _stems(job / JOURNAL, _JOURNAL_SUFFIX)


def new_part_name(job: Path, worker: str) -> str:
    """`<worker>-<seq>`, above every name of this worker that a part or a journal has."""
    taken = [name.rpartition("-") for name in part_names(job) + journal_names(job)]
    numbers = [int(seq) for owner, _, seq in taken if owner == worker and seq.isdigit()]
    return f"{worker}-{max(numbers, default=-1) + 1:05d}"


def _stems(folder: Path, suffix: str) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(path.name.removesuffix(suffix) for path in folder.iterdir() if path.name.endswith(suffix))
