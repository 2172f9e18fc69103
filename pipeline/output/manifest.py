"""What a proof found, as a file that goes with the data: the same bytes for the same directory.

Knows: the manifest's form. Refuses to know: whether it is right (`verify.py`), times, machines.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pipeline import durable
from pipeline.output.integrity import sha256_of
from pipeline.output.layout import DATASET, part_path
from pipeline.output.progress import JobDirectory
from pipeline.output.published import Published
from pipeline.output.verdict import PartFound, Verdict
from pipeline.store import FileStore

FORMAT = 1


def write_manifest(job: str | Path, verdict: Verdict, path: Path) -> None:
    """Puts what `verify` found into `path`, in place of what was there. Raises ValueError, OSError."""
    directory = JobDirectory.load(job)
    content = json.dumps(manifest(directory, verdict), indent=1, sort_keys=True, ensure_ascii=False)
    with durable.full_disk_named(path.parent):
        durable.atomic_write(path, (content + "\n").encode("utf-8", "surrogatepass"))


def manifest(directory: JobDirectory, verdict: Verdict) -> dict[str, Any]:
    """rows: of the input. Results, errors, skipped and tokens are of what counts, of the job and each part.

    sha256 of a part: of its committed bytes, also if it was deleted since; null if it cannot be read.
    """
    published = Published.read(directory.store, directory.path)
    return {
        "format": FORMAT,
        "complete": verdict.complete,
        "problems": verdict.num_problems,
        "fingerprint": directory.plan.digest,
        "input": directory.index.digest,
        "rows": directory.num_rows,
        "samples": directory.samples,
        "void_rows": verdict.num_void,
        **_counts(dataclasses.asdict(verdict.total)),
        "parts": [_part(directory, published, part) for part in verdict.parts],
        "dataset": _dataset(directory) if verdict.has_dataset else None,
    }


def _part(directory: JobDirectory, published: Published, part: PartFound) -> dict[str, Any]:
    gone = published.deleted.get(part.name)
    path = part_path(directory.path, part.name)
    if gone is None:
        sha256 = sha256_of(directory.store, path, part.size) if directory.store.exists(path) else None
    else:
        sha256 = gone.sha256
    return {
        "part": part.name,
        "incarnation": part.incarnation,
        "worker": part.worker,
        "bytes": part.size,
        "sha256": sha256,
        "deleted": gone is not None,
        "void_rows": part.num_void,
        **_counts(dataclasses.asdict(part.counted)),
    }


def _counts(tally: dict[str, int]) -> dict[str, int]:
    results = tally.pop("rows")
    return {"results": results, **tally}


def _dataset(directory: JobDirectory) -> list[dict[str, Any]]:
    """The files of the finished dataset, by name."""
    folder, store = directory.path / DATASET, FileStore()
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        {
            "file": path.relative_to(folder).as_posix(),
            "bytes": store.size(path),
            "sha256": sha256_of(store, path),
        }
        for path in files
    ]
