"""Compacts the parts of a job, in the order of the input, into a dataset.

Knows: which rows go in and in which order, and how a new dataset takes the place of an old one. Refuses to
know: how the files look (`dataset.py`), what is published meanwhile (`cluster/publish.py`). The result is a
function of input, settings and completions: how often the job was interrupted, by whom and when it ran, how
its parts lie, and whether some of it was published before, leave no trace.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import durable
from pipeline.input.order import Unit
from pipeline.output.card import card
from pipeline.output.dataset import DatasetFormat, Piece, Sharding, write_dataset
from pipeline.output.integrity import file_problems
from pipeline.output.layout import DATASET
from pipeline.output.progress import JobDirectory
from pipeline.output.published import Published
from pipeline.output.ranges import unit_ranges
from pipeline.output.schema import PROVENANCE
from pipeline.output.shards import BATCH_ROWS, rebatch
from pipeline.output.stored import StoredRows, StoredUnit
from pipeline.request import FinishReason

_FINISHED = pa.array([FinishReason.STOP.value, FinishReason.LENGTH.value])
# What a finalize that goes on, or died, leaves beside the dataset: folders whose names begin so.
_UNFINISHED = f".{DATASET}."


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
    form: DatasetFormat | None = None,
    selection: Selection = Selection(),  # noqa: B008
    shard_bytes: int | None = None,
    range_rows: int | None = None,
) -> Finalized:
    """Writes `DIR/dataset`, in place of an earlier one; until it is done, the earlier one stays.

    form, shard_bytes, range_rows: see Sharding; None takes what was published as an example. Of two at work
    on one directory the one that began later ends well. Raises ValueError if the job is not complete (unless
    selection.partial), its files are damaged or another finalize began; FullDisk, OSError.
    """
    directory = JobDirectory.load(job)
    published = Published.read(directory.store, directory.path)
    for problem in file_problems(directory, published):
        raise ValueError(f"{problem}; python -m pipeline.verify {directory.path} tells all that is wrong")
    stored = directory.stored()
    if not selection.partial:
        _require_complete(directory, stored)
    schema = dataset_schema(directory, selection)
    sharding = chosen_sharding(published, form, shard_bytes, range_rows)
    with durable.full_disk_named(directory.path):
        _discard_unfinished(directory.path)
        temporary = directory.path / f"{_UNFINISHED}new.{secrets.token_hex(4)}"
        temporary.mkdir()
        pieces = _pieces(directory, stored, published, selection, sharding)
        try:
            num_rows, files = write_dataset(temporary, schema, pieces, sharding, schema_identity(schema))
            text = card(
                directory.plan, sharding.form, num_rows, schema, selection.partial, selection.drop_failed
            )
            durable.atomic_write(temporary / "README.md", text.encode("utf-8", "replace"))
            target = _put_in_place(temporary)
        except OSError as error:
            if not temporary.exists():
                raise ValueError(
                    f"another finalize began on {directory.path} after this one, which ends here"
                ) from error
            # a full disk must not stay full of half a dataset
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return Finalized(target, num_rows, tuple(target / path.relative_to(temporary) for path in files))


def chosen_sharding(
    published: Published, form: DatasetFormat | None, shard_bytes: int | None, range_rows: int | None
) -> Sharding:
    """What is wanted, for the rest as it was published, else by default. Raises ValueError."""
    usual = published.sharding or Sharding()
    return Sharding(
        usual.form if form is None else form,
        usual.shard_bytes if shard_bytes is None else shard_bytes,
        usual.range_rows if range_rows is None else range_rows,
    )


def dataset_schema(directory: JobDirectory, selection: Selection) -> pa.Schema:
    """The parts' schema, its provenance made complete: which input, and what was left out."""
    schema = directory.schema.arrow
    facts = json.loads(schema.metadata[PROVENANCE])
    facts["input"] = directory.index.digest
    facts["finalize"] = dataclasses.asdict(selection)
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return schema.with_metadata({**schema.metadata, PROVENANCE: text.encode()})


def schema_identity(schema: pa.Schema) -> str:
    """One name for what a dataset is: its columns and where it comes from."""
    return hashlib.sha256(schema.serialize()).hexdigest()


def finished_batches(
    directory: JobDirectory, stored: StoredRows, selection: Selection
) -> Iterator[pa.RecordBatch]:
    """The rows of the dataset, in its order."""
    tables = (table for unit in directory.units for table in unit_tables(directory, stored, selection, unit))
    return rebatch(tables, dataset_schema(directory, selection))


def _pieces(
    directory: JobDirectory,
    stored: StoredRows,
    published: Published,
    selection: Selection,
    sharding: Sharding,
) -> Iterator[Piece]:
    """The rows of each range, or its shards if they are there already."""
    schema = dataset_schema(directory, selection)
    for units in unit_ranges(directory.units, directory.samples, sharding.range_rows):
        found = published.ranges.get(units)
        if found and found.sharding == sharding and found.schema == schema_identity(schema):
            yield found.piece(directory.path)
            continue
        tables = (
            table
            for number in range(units.first, units.last + 1)
            for table in unit_tables(directory, stored, selection, directory.units[number])
        )
        yield rebatch(tables, schema)


def unit_tables(
    directory: JobDirectory, stored: StoredRows, selection: Selection, unit: Unit
) -> Iterator[pa.Table]:
    """The rows of a unit that go into a dataset. Raises ValueError if one is missing or there twice."""
    rows = stored.unit(unit)
    if not selection.partial:
        require_exactly_once(directory, rows)
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


def require_exactly_once(directory: JobDirectory, rows: StoredUnit) -> None:
    """Raises ValueError if a result of the unit is missing or there twice."""
    if len(rows.doubled()) or not rows.done().all():
        missing = int(np.count_nonzero(~rows.done()))
        raise ValueError(
            f"unit {rows.unit.number} of {directory.path} lacks {missing} results and has "
            f"{len(rows.doubled())} twice: python -m pipeline.verify {directory.path} tells which"
        )


def _put_in_place(new: Path) -> Path:
    """Gives a whole folder the dataset's name. Raises OSError if somebody took it away."""
    target = new.with_name(DATASET)
    durable.fsync_directory(new)
    while True:
        old = new.with_name(f"{_UNFINISHED}old.{secrets.token_hex(4)}")
        if target.exists():
            durable.rename(target, old)
        try:
            durable.rename(new, target)
            break
        except OSError:
            if new.exists() and target.exists():
                # another one was put there at this very moment
                shutil.rmtree(old, ignore_errors=True)
                continue
            if old.exists() and not target.exists():
                # one that began later took ours away, and has perhaps ended already
                durable.rename(old, target)
            raise
    durable.fsync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)
    return target


def _discard_unfinished(job: Path) -> None:
    """Takes away what others left or are at work on: those find out, and end."""
    for path in job.glob(f"{_UNFINISHED}*"):
        # by another name first: nothing of what is being put in place at this moment may be deleted
        rubbish = job / f"{_UNFINISHED}old.{secrets.token_hex(4)}"
        try:
            durable.rename(path, rubbish)
        except OSError:
            continue
        shutil.rmtree(rubbish, ignore_errors=True)
