"""What the rows of a unit that count add up to, commit by commit.

Knows: which columns are summed. Refuses to know: parts, jobs, what the sums should be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.output.ledger import CommitRef
from pipeline.output.published import BatchRef
from pipeline.output.stored import StoredRows, StoredUnit
from pipeline.request import FinishReason


@dataclass(frozen=True)
class Tally:
    """Results that count, those of them in error or skipped, and their tokens."""

    rows: int = 0
    errors: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Tally) -> Tally:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Tally(*(a + b for a, b in zip(mine, theirs, strict=True)))


def tallies(stored: StoredRows, found: StoredUnit) -> Iterator[tuple[CommitRef | BatchRef, Tally]]:
    """For each batch that holds rows of the unit which count: what these add up to."""
    current = found.ordered()
    for number in np.unique(found.commit[current]):
        ref = found.commits[number]
        index = pa.array(found.index[current[found.commit[current] == number]])
        batch = stored.files.read(ref)
        reasons = batch.column("finish_reason").take(index)
        yield (
            ref,
            Tally(
                rows=len(index),
                errors=_count(reasons, FinishReason.ERROR),
                skipped=_count(reasons, FinishReason.SKIPPED),
                prompt_tokens=_sum(batch, "prompt_tokens", index),
                completion_tokens=_sum(batch, "completion_tokens", index),
            ),
        )


def _count(reasons: pa.Array, reason: FinishReason) -> int:
    return int(pc.sum(pc.equal(reasons, reason.value)).as_py() or 0)


def _sum(batch: pa.RecordBatch, column: str, index: pa.Array) -> int:
    return int(pc.sum(batch.column(column).take(index)).as_py() or 0)
