"""Proves a job's output complete and right, from the source and the files, trusting nothing in between.

Knows: what must be true of every commit, every row and the finished dataset. Refuses to know: how to mend
it. Problems are lines of text that say where; memory is bounded by a unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.input.order import Unit
from pipeline.input.rows import Row, read_rows
from pipeline.input.source import Source, open_source
from pipeline.output.commit_check import commit_problems
from pipeline.output.dataset_check import dataset_problems, first_difference
from pipeline.output.encode import gather
from pipeline.output.integrity import file_problems
from pipeline.output.layout import DATASET
from pipeline.output.lease_check import holder_problems, lease_problems
from pipeline.output.ledger import CommitRef, Ledger
from pipeline.output.progress import JobDirectory
from pipeline.output.published import Published
from pipeline.output.shards import BATCH_ROWS
from pipeline.output.stored import StoredRows, StoredUnit
from pipeline.output.tally import Tally, tallies
from pipeline.output.verdict import PartFound, Verdict

_SHOWN_PER_UNIT = 5


def verify(job: str | Path, source: Source | None = None) -> Verdict:
    """Reads source, parts, journals, leases and the finished dataset again, and compares.

    source: where the input is read from; None opens what `job.json` names. Raises ValueError if the
    directory holds no job.
    """
    verdict = Verdict()
    directory = JobDirectory.load(job)
    for problem in lease_problems(directory):
        verdict.add(problem)
    try:
        published = Published.read(directory.store, directory.path)
        for problem in file_problems(directory, published):
            verdict.add(problem)
        stored = directory.stored()
    except (ValueError, OSError) as error:
        if str(error) not in verdict.problems:
            verdict.add(str(error))
        return verdict
    for problems in (
        holder_problems(directory, stored.ledger),
        _deleted_problems(stored.ledger, published),
        commit_problems(directory, stored, published.deleted),
    ):
        for problem in problems:
            verdict.add(problem)
    rows = _source_rows(directory, source, verdict)
    counted = _of_shards(stored)
    for unit in directory.units:
        found = _check_unit(directory, stored, unit, verdict, counted)
        # a source that failed once gives no more rows
        rows = rows and _compared(directory, stored, unit, found, rows, verdict)
    verdict.parts = _parts_found(stored.ledger, counted)
    if (directory.path / DATASET).exists():
        verdict.has_dataset = True
        for problem in dataset_problems(directory, stored):
            verdict.add(problem)
    return verdict


def _deleted_problems(ledger: Ledger, published: Published) -> Iterator[str]:
    """Parts that were deleted though rows of them count that were not published."""
    if not published.deleted:
        return
    mask = published.mask(ledger.num_units)
    for unit, part in ledger.counting().tolist():
        name = ledger.parts[part].header.part
        if name in published.deleted and not mask[unit]:
            yield f"part {name} was deleted, and its rows of unit {unit} are not published"


def _of_shards(stored: StoredRows) -> dict[str, Tally]:
    """What counts of each part, as far as that can only be known from what was published."""
    counted: dict[str, Tally] = {}
    for published in stored.sharded.ranges if stored.sharded else ():
        for name, fields in published.parts.items():
            counted[name] = counted.get(name, Tally()) + Tally(**fields)
    return counted


def _parts_found(ledger: Ledger, counted: Mapping[str, Tally]) -> list[PartFound]:
    found = []
    for part in ledger.parts:
        header, mine = part.header, counted.get(part.header.part, Tally())
        void = part.totals.rows - mine.rows
        found.append(PartFound(header.part, header.incarnation, header.worker, part.committed, mine, void))
    return sorted(found, key=lambda one: one.name)


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
    directory: JobDirectory, stored: StoredRows, unit: Unit, verdict: Verdict, counted: dict[str, Tally]
) -> StoredUnit | None:
    """Whether each result of the unit is there once; None if its rows cannot be read.

    counted: by part; what counts of the unit is added to it.
    """
    try:
        found = stored.unit(unit)
        for problem in _once_problems(directory, stored, found):
            verdict.add(problem)
        sums = list(tallies(stored, found))
    except (ValueError, OSError) as error:
        verdict.add(f"unit {unit.number} cannot be read: {error}")
        return None
    for ref, tally in sums:
        verdict.total += tally
        if isinstance(ref, CommitRef):
            name = stored.ledger.parts[ref.part].header.part
            counted[name] = counted.get(name, Tally()) + tally
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
        ref = found.commits[found.commit[position]]
        if isinstance(ref, CommitRef):
            where = f"part {stored.ledger.parts[ref.part].header.part}"
        else:
            where = f"shard {ref.path}"
        yield f"{_name(directory, found.unit, int(found.slots[position]))} is there again in {where}"
    if len(doubled) > _SHOWN_PER_UNIT:
        yield f"unit {found.unit.number}: {len(doubled) - _SHOWN_PER_UNIT} more results are there again"
    ledger, unit = stored.ledger, found.unit.number
    counted = sum(ledger.rows_claimed(unit)) - ledger.num_retried(unit)
    if not len(doubled) and counted != np.count_nonzero(found.current):
        yield (
            f"unit {found.unit.number}: the journals count {counted} results, "
            f"the parts hold {np.count_nonzero(found.current)}"
        )


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


def _name(directory: JobDirectory, unit: Unit, slot: int) -> str:
    """A result in words: which file and row of the input, which sample."""
    row, sample = divmod(slot, directory.samples)
    files, rows = directory.order.keys(unit.start + row, unit.start + row + 1)
    path = directory.index.files[int(files[0])].path
    return f"row {int(rows[0])} of file {int(files[0])} ({path}), sample {sample}"
