"""Whether the finished dataset holds the rows that the parts hold, value by value.

Knows: how two columns are compared. Refuses to know: whether the parts are right (`verify.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import zip_longest

import pyarrow as pa

from pipeline.output.dataset import DatasetFiles, dataset_files
from pipeline.output.finalize import Selection, finished_batches
from pipeline.output.layout import DATASET
from pipeline.output.progress import JobDirectory
from pipeline.output.shards import rebatch
from pipeline.output.stored import StoredRows


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


def dataset_problems(directory: JobDirectory, stored: StoredRows) -> Iterator[str]:
    """In what the dataset differs, a line for each form it lies in: the first difference."""
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
