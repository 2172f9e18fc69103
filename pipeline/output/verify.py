"""Proves a job's output complete and right, from the source and the files, trusting nothing in between.

Knows: what must be true of every commit, every row and the finished dataset. Refuses to know: how to mend
it. Problems are lines of text that say where; memory is bounded by a unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.input.order import Unit
from pipeline.input.rows import Row, read_rows
from pipeline.input.source import Source, open_source
from pipeline.output import commit_check
from pipeline.output.dataset import BATCH_ROWS, DatasetFiles, dataset_files, rebatch
from pipeline.output.encode import gather
from pipeline.output.finalize import Selection, finished_batches
from pipeline.output.integrity import file_problems
from pipeline.output.layout import DATASET
from pipeline.output.ledger import Ledger
from pipeline.output.progress import JobDirectory
from pipeline.output.stored import StoredRows, StoredUnit
from pipeline.request import FinishReason

_SHOWN_PER_UNIT = 5


@dataclass
class Verdict:
    """What was found. `problems` keeps the first ones; `num_problems` counts all."""

    num_results: int = 0
    num_errors: int = 0
    num_skipped: int = 0
    has_dataset: bool = False
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)
    max_kept: int = 50

    @property
    def complete(self) -> bool:
        return self.num_problems == 0

    def add(self, problem: str) -> None:
        self.num_problems += 1
        if len(self.problems) < self.max_kept:
            self.problems.append(problem)


def verify(job: str | Path, source: Source | None = None) -> Verdict:
    """Reads source, parts, journals and the finished dataset again, and compares.

    source: where the input is read from; None opens what `job.json` names. Raises ValueError if the
    directory holds no job.
    """
    verdict = Verdict()
    directory = JobDirectory.load(job)
    for problem in file_problems(directory.path, directory.plan.digest):
        verdict.add(problem)
    try:
        stored = StoredRows(Ledger.read(directory.path), directory.order, directory.samples)
    except (ValueError, OSError) as error:
        if str(error) not in verdict.problems:
            verdict.add(str(error))
        return verdict
    for problem in commit_check.commit_problems(directory, stored):
        verdict.add(problem)
    rows = _source_rows(directory, source, verdict)
    for unit in directory.units:
        found = _check_unit(directory, stored, unit, verdict)
        # a source that failed once gives no more rows
        rows = rows and _compared(directory, stored, unit, found, rows, verdict)
    if (directory.path / DATASET).exists():
        verdict.has_dataset = True
        for problem in _dataset_problems(directory, stored):
            verdict.add(problem)
    return verdict


def _source_rows(directory: JobDirectory, source: Source | None, verdict: Verdict) -> Iterator[Row] | None:
    """All rows of the job from the source again; None if it cannot be opened or nothing is carried."""
    try:
        source = source or open_source(directory.plan.source, directory.index)
        source.check(directory.index)
    except (ValueError, OSError) as error:
        verdict.add(f"source: {error}")
    if source is None or not directory.schema.carried:
        return None
    everything = [range(directory.num_rows)]
    return read_rows(source, directory.order, everything, list(directory.schema.carried))


def _check_unit(
    directory: JobDirectory, stored: StoredRows, unit: Unit, verdict: Verdict
) -> StoredUnit | None:
    """Whether each result of the unit is there once; None if its rows cannot be read."""
    try:
        found = stored.unit(unit)
        for problem in _once_problems(directory, stored, found):
            verdict.add(problem)
        reasons = _count_reasons(stored, found)
    except (ValueError, OSError) as error:
        verdict.add(f"unit {unit.number} cannot be read: {error}")
        return None
    verdict.num_results += sum(reasons.values())
    verdict.num_errors += reasons.get(FinishReason.ERROR.value, 0)
    verdict.num_skipped += reasons.get(FinishReason.SKIPPED.value, 0)
    return found


def _compared(
    directory: JobDirectory,
    stored: StoredRows,
    unit: Unit,
    found: StoredUnit | None,
    rows: Iterator[Row],
    verdict: Verdict,
) -> Iterator[Row] | None:
    """Takes the unit's rows off `rows` and compares them; None if the source failed."""
    try:
        for begin in range(unit.start, unit.stop, BATCH_ROWS):
            num_rows = min(unit.stop - begin, BATCH_ROWS)
            expected = list(islice(rows, num_rows))
            if len(expected) < num_rows:
                raise ValueError(f"{num_rows - len(expected)} rows are no longer there")
            if found is not None:
                for problem in _carried_problems(directory, stored, found, expected):
                    verdict.add(problem)
    except (ValueError, OSError) as error:
        verdict.add(f"source, unit {unit.number}: {error}")
        return None
    return rows


def _once_problems(directory: JobDirectory, stored: StoredRows, found: StoredUnit) -> Iterator[str]:
    missing = np.flatnonzero(~found.done())
    for slot in missing[:_SHOWN_PER_UNIT]:
        yield f"{_name(directory, found.unit, int(slot))} is missing"
    if len(missing) > _SHOWN_PER_UNIT:
        yield f"unit {found.unit.number}: {len(missing) - _SHOWN_PER_UNIT} more results are missing"
    doubled = found.doubled()
    for position in doubled[:_SHOWN_PER_UNIT]:
        part = stored.ledger.parts[found.commits[found.commit[position]].part].header.part
        yield f"{_name(directory, found.unit, int(found.slots[position]))} is there again in part {part}"
    if len(doubled) > _SHOWN_PER_UNIT:
        yield f"unit {found.unit.number}: {len(doubled) - _SHOWN_PER_UNIT} more results are there again"
    ledger, unit = stored.ledger, found.unit.number
    counted = sum(ledger.rows_claimed(unit)) - ledger.num_retried(unit)
    if not len(doubled) and counted != np.count_nonzero(found.current):
        yield (
            f"unit {found.unit.number}: the journals count {counted} results, "
            f"the parts hold {np.count_nonzero(found.current)}"
        )


def _count_reasons(stored: StoredRows, found: StoredUnit) -> dict[str, int]:
    counts: dict[str, int] = {}
    current = found.ordered()
    for number in np.unique(found.commit[current]):
        index = pa.array(found.index[current[found.commit[current] == number]])
        reasons = stored.files.read(found.commits[number]).column("finish_reason").take(index)
        for entry in pc.value_counts(reasons).to_pylist():
            counts[entry["values"]] = counts.get(entry["values"], 0) + entry["counts"]
    return counts


def _carried_problems(
    directory: JobDirectory, stored: StoredRows, found: StoredUnit, expected: list[Row]
) -> Iterator[str]:
    """Compares the carried columns of stored rows with those of the same rows in the source."""
    begin = (expected[0].ordinal - found.unit.start) * directory.samples
    positions = found.ordered()
    slots = found.slots[positions]
    inside = (slots >= begin) & (slots < begin + len(expected) * directory.samples)
    positions, slots = positions[inside], slots[inside]
    if not len(positions):
        return
    theirs = gather(directory.schema, expected)
    index = pa.array((slots - begin) // directory.samples)
    ours = stored.take(found, positions)
    for name, column in zip(directory.schema.carried.values(), theirs, strict=True):
        wrong = first_difference(ours.column(name).combine_chunks(), column.take(index))
        if wrong is not None:
            where = _name(directory, found.unit, int(slots[wrong]))
            yield f"{where}: column {name} differs from the source's value"


def first_difference(ours: pa.Array, theirs: pa.Array) -> int | None:
    """The first place where two arrays differ; NaN equals NaN."""
    if isinstance(ours, pa.ChunkedArray):
        ours = pa.concat_arrays(ours.chunks)
    if ours.equals(theirs):
        return None
    for place, (a, b) in enumerate(zip(ours.to_pylist(), theirs.to_pylist(), strict=False)):
        if repr(a) != repr(b):
            return place
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _dataset_problems(directory: JobDirectory, stored: StoredRows) -> Iterator[str]:
    folder = directory.path / DATASET
    try:
        for files in dataset_files(folder):
            yield from _form_problems(directory, stored, files)
    except (ValueError, OSError) as error:
        yield f"dataset {folder}: {error}; run finalize again"


def _form_problems(directory: JobDirectory, stored: StoredRows, files: DatasetFiles) -> Iterator[str]:
    """Stops at the first difference: after a row too few or too many all others differ."""
    schema = files.schema()
    selection = Selection(**files.options())
    what = f"dataset {files.paths[0].parent} ({files.form.value})"
    if not schema.equals(directory.schema.arrow):
        yield f"{what} has other columns than the parts; run finalize again"
        return
    actual = rebatch(files.tables(), schema)
    place = 0
    for ours, theirs in zip_longest(actual, finished_batches(directory, stored, selection)):
        row, column = _batch_difference(ours, theirs)
        if row is not None:
            yield f"{what} differs from the parts in row {place + row}, {column}; run finalize again"
            return
        place += ours.num_rows


def _batch_difference(ours: pa.RecordBatch | None, theirs: pa.RecordBatch | None) -> tuple[int | None, str]:
    if ours is None or theirs is None:
        return 0, "which is missing" if ours is None else "which should not be there"
    common = min(ours.num_rows, theirs.num_rows)
    rows = [math.inf if ours.num_rows == theirs.num_rows else common]
    names = ["which is missing" if ours.num_rows < theirs.num_rows else "which should not be there"]
    for name in ours.schema.names:
        wrong = first_difference(ours.column(name).slice(0, common), theirs.column(name).slice(0, common))
        if wrong is not None:
            rows.append(wrong)
            names.append(f"column {name}")
    least = min(rows)
    return (None, "") if least == math.inf else (int(least), names[rows.index(least)])


def _name(directory: JobDirectory, unit: Unit, slot: int) -> str:
    """A result in words: which file and row of the input, which sample."""
    row, sample = divmod(slot, directory.samples)
    files, rows = directory.order.keys(unit.start + row, unit.start + row + 1)
    path = directory.index.files[int(files[0])].path
    return f"row {int(rows[0])} of file {int(files[0])} ({path}), sample {sample}"
