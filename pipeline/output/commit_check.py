"""Whether each commit holds what its journal line says: rows, units, errors, tokens.

Knows: one commit at a time. Refuses to know: whether all commits together make a whole job (`verify.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import groupby

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.output import journal
from pipeline.output.journal import Commit, Totals
from pipeline.output.layout import journal_path, part_path
from pipeline.output.ledger import CommitRef, Ledger
from pipeline.output.progress import JobDirectory
from pipeline.output.stored import StoredRows
from pipeline.request import FinishReason

_REASONS = pa.array([reason.value for reason in FinishReason])


def commit_problems(
    directory: JobDirectory, stored: StoredRows, deleted: Collection[str] = ()
) -> Iterator[str]:
    """What is wrong with single commits, a line each that names part and commit.

    deleted: parts that need not be there, since their rows were published.
    """
    for number, (part, refs) in enumerate(zip(stored.ledger.parts, _by_part(stored.ledger), strict=True)):
        name = part.header.part
        if name in deleted and not directory.store.exists(part_path(directory.path, name)):
            continue
        try:
            if not stored.files.schema(number).equals(directory.schema.arrow):
                yield f"part {name} has other columns than the job writes"
        except (ValueError, OSError) as error:
            yield str(error)
        before = Totals()
        entries = journal.read(journal_path(directory.path, name), directory.store)
        commits = (entry for entry in entries if isinstance(entry, Commit))
        # a job that goes on may have committed more by now
        for ref, commit in zip(refs, commits, strict=False):
            try:
                batch = stored.files.read(ref)
                problems = list(_batch_problems(directory, batch, commit, commit.totals - before))
            except (ValueError, OSError) as error:
                problems = [str(error)]
            yield from (f"part {name}, commit {commit.seq}: {problem}" for problem in problems)
            before = commit.totals


def _by_part(ledger: Ledger) -> Iterator[list[CommitRef]]:
    """The commits of each part in turn."""
    groups = groupby(ledger.all_commits(), key=lambda ref: ref.part)
    ahead = next(groups, None)
    for number in range(len(ledger.parts)):
        if ahead is None or ahead[0] != number:
            yield []
            continue
        yield list(ahead[1])
        ahead = next(groups, None)


def _batch_problems(
    directory: JobDirectory, batch: pa.RecordBatch, commit: Commit, added: Totals
) -> Iterator[str]:
    reasons = batch.column("finish_reason")
    failed = pc.equal(reasons, FinishReason.ERROR.value)
    held = Totals(
        rows=batch.num_rows,
        retried=sum(unit.retried for unit in commit.units),
        errors=_sum(failed),
        skipped=_sum(pc.equal(reasons, FinishReason.SKIPPED.value)),
        prompt_tokens=_sum(batch.column("prompt_tokens")),
        completion_tokens=_sum(batch.column("completion_tokens")),
    )
    if held != added:
        yield f"holds {held}, its journal says {added}"
    if not pc.all(pc.is_in(reasons, _REASONS), min_count=0).as_py():
        yield "has a finish_reason that is none"
    if not pc.equal(batch.column("error").is_valid(), failed).true_count == batch.num_rows:
        yield "has an error without finish_reason error, or the reverse"
    files, rows = batch.column("file").to_numpy(), batch.column("row").to_numpy()
    sample = batch.column("sample").to_numpy()
    known = directory.order.contains(files, rows) & (sample >= 0) & (sample < directory.samples)
    for stray in np.flatnonzero(~known)[:1]:
        yield f"row {rows[stray]} of file {files[stray]}, sample {sample[stray]} does not belong to the job"
        return
    units = _units(directory, files, rows, failed.to_numpy(zero_copy_only=False))
    claimed = [(unit.unit, unit.rows, unit.errors) for unit in sorted(commit.units)]
    if units != claimed:
        yield f"holds (unit, rows, errors) {units}, its journal says {claimed}"


def _units(
    directory: JobDirectory, files: np.ndarray, rows: np.ndarray, failed: np.ndarray
) -> list[tuple[int, int, int]]:
    numbers, which = np.unique(
        directory.units.numbers(directory.order.ordinals(files, rows)), return_inverse=True
    )
    counts, errors = np.bincount(which), np.bincount(which, failed).astype(np.int64)
    return list(zip(numbers.tolist(), counts.tolist(), errors.tolist(), strict=True))


def _sum(values: pa.Array) -> int:
    return int(pc.sum(values).as_py() or 0)
