"""Compacts the parts of a job, in the order of the input, into a dataset.

Knows: which rows go in and in which order. Refuses to know: how the files look (`dataset.py`). The result
is a function of input, settings and completions: how often the job was interrupted, by whom and when it
ran, and how its parts lie, leave no trace.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import durable
from pipeline.output.card import card
from pipeline.output.dataset import BATCH_ROWS, DatasetFormat, rebatch, write_dataset
from pipeline.output.integrity import file_problems
from pipeline.output.layout import DATASET
from pipeline.output.progress import JobDirectory
from pipeline.output.schema import PROVENANCE
from pipeline.output.stored import StoredRows, StoredUnit
from pipeline.request import FinishReason

_FINISHED = pa.array([FinishReason.STOP.value, FinishReason.LENGTH.value])


@dataclass(frozen=True)
class Selection:
    """partial: take what is there of a job that is not complete. drop_failed: leave out errors, skipped."""

    partial: bool = False
    drop_failed: bool = False


@dataclass(frozen=True)
class Finalized:
    path: Path
    num_rows: int
    files: tuple[Path, ...]


def finalize(
    job: str | Path,
    form: DatasetFormat = DatasetFormat.arrow,
    selection: Selection = Selection(),  # noqa: B008
) -> Finalized:
    """Writes `DIR/dataset`, in place of an earlier one.

    Raises ValueError if the job is not complete (unless selection.partial) or its files are damaged,
    FullDisk, OSError. Until it is done, an earlier dataset stays.
    """
    directory = JobDirectory.load(job)
    for problem in file_problems(directory.path, directory.plan.digest):
        raise ValueError(f"{problem}; python -m pipeline.verify {directory.path} tells all that is wrong")
    stored = directory.stored()
    if not selection.partial:
        _require_complete(directory, stored)
    schema = dataset_schema(directory, selection)
    target = directory.path / DATASET
    temporary = directory.path / f".{DATASET}.new"
    with durable.full_disk_named(directory.path):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        batches = rebatch(_tables(directory, stored, selection), schema)
        identity = hashlib.sha256(schema.serialize()).hexdigest()
        try:
            num_rows, files = write_dataset(temporary, schema, batches, form, identity)
            text = card(directory.plan, form, num_rows, schema, selection.partial, selection.drop_failed)
            durable.atomic_write(temporary / "README.md", text.encode("utf-8", "replace"))
        except OSError:
            # a full disk must not stay full of half a dataset
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _replace(target, temporary)
    return Finalized(target, num_rows, tuple(target / path.relative_to(temporary) for path in files))


def dataset_schema(directory: JobDirectory, selection: Selection) -> pa.Schema:
    """The parts' schema, its provenance made complete: which input, and what was left out."""
    schema = directory.schema.arrow
    facts = json.loads(schema.metadata[PROVENANCE])
    facts["input"] = directory.index.digest
    facts["finalize"] = dataclasses.asdict(selection)
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return schema.with_metadata({**schema.metadata, PROVENANCE: text.encode()})


def finished_batches(
    directory: JobDirectory, stored: StoredRows, selection: Selection
) -> Iterator[pa.RecordBatch]:
    """The rows of the dataset, in its order and its batches."""
    return rebatch(_tables(directory, stored, selection), dataset_schema(directory, selection))


def _tables(directory: JobDirectory, stored: StoredRows, selection: Selection) -> Iterator[pa.Table]:
    for unit in directory.units:
        rows = stored.unit(unit)
        if not selection.partial:
            _require_exactly_once(directory, rows)
        positions = rows.ordered()
        # a unit's texts can be large: never more than a batch of them at once
        for begin in range(0, len(positions), BATCH_ROWS):
            table = stored.take(rows, positions[begin : begin + BATCH_ROWS])
            if selection.drop_failed:
                table = table.filter(pc.is_in(table.column("finish_reason"), _FINISHED))
            yield table


def _require_complete(directory: JobDirectory, stored: StoredRows) -> None:
    """By the journals alone, before anything is written."""
    rows, _ = stored.ledger.sums(max(len(directory.units), stored.ledger.num_units))
    total = directory.num_rows * directory.samples
    if int(rows.sum()) < total:
        raise ValueError(
            f"{directory.path} is not complete: {int(rows.sum())} of {total} results are there. "
            "Start the job again to make the rest, or use --partial to take what is there"
        )


def _require_exactly_once(directory: JobDirectory, rows: StoredUnit) -> None:
    if len(rows.doubled()) or not rows.done().all():
        missing = int(np.count_nonzero(~rows.done()))
        raise ValueError(
            f"unit {rows.unit.number} of {directory.path} lacks {missing} results and has "
            f"{len(rows.doubled())} twice: python -m pipeline.verify {directory.path} tells which"
        )


def _replace(target: Path, new: Path) -> None:
    durable.fsync_directory(new)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        durable.rename(target, old)
    durable.rename(new, target)
    durable.fsync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)
