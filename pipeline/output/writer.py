"""Completions -> parts: collects what finished and commits it every few seconds.

Knows: when to commit, when a part is full, which units and retries a commit speaks of. Refuses to know:
what makes a commit durable (`part.py`), where completions come from.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from pipeline.config import OutputConfig
from pipeline.input.order import Units
from pipeline.output.encode import encode
from pipeline.output.journal import Totals, UnitRows
from pipeline.output.layout import new_part_name
from pipeline.output.part import Origin, PartWriter
from pipeline.output.schema import OutputSchema
from pipeline.request import Completion, FinishReason

# What may wait in memory for the next commit, whatever the interval.
_MAX_PENDING_BYTES = 64 * 2**20
_MAX_PENDING_ROWS = 16384


class OutputWriter:
    """Takes completions of one process; what `commit` returned from is there for good.

    As a context manager it commits on the way out, also when an error passes by, so that finished rows
    survive it. After an error of its own it takes nothing more: start the job again.
    """

    def __init__(
        self,
        job: Path,
        schema: OutputSchema,
        units: Units,
        origin: Origin,
        output: OutputConfig,
        retrying: set[tuple[int, int]],
    ) -> None:
        self._job = job
        self._schema = schema
        self._units = units
        self._origin = origin
        self._interval = output.commit_interval_s
        self._max_part_bytes = output.max_part_bytes
        self._topk_bytes = output.topk * 8
        self._retrying = retrying
        self._part: PartWriter | None = None
        self._pending: list[Completion] = []
        self._pending_bytes = 0
        self._last_commit = time.monotonic()
        self._failed = False
        self.num_committed = 0

    def append(self, completion: Completion) -> None:
        """Keeps a completion for the next commit, which may be now. Its payload is a PromptRow."""
        assert not self._failed, "output failed and takes no more rows"
        self._pending.append(completion)
        self._pending_bytes += self._size(completion)
        full = self._pending_bytes >= min(_MAX_PENDING_BYTES, self._max_part_bytes)
        if full or len(self._pending) >= _MAX_PENDING_ROWS:
            self.commit()
        else:
            self.commit_if_due()

    def commit_if_due(self) -> None:
        """Commits if the interval has passed; for a loop that goes on while no row ends."""
        if self._pending and time.monotonic() - self._last_commit >= self._interval:
            self.commit()

    def commit(self) -> None:
        """Makes all completions so far durable. Raises FullDisk, OSError."""
        self._last_commit = time.monotonic()
        if not self._pending:
            return
        assert not self._failed, "output failed and takes no more rows"
        # until it is over, nobody knows how much of this commit is on disk
        self._failed = True
        pending = sorted(self._pending, key=lambda c: (c.request.payload.row.ordinal, c.sample))
        message = encode(self._schema, pending).serialize()
        units, totals = self._account(pending)
        self._part_for(message).commit(message, units, totals)
        self.num_committed += len(pending)
        self._pending, self._pending_bytes = [], 0
        self._failed = False

    def close(self) -> None:
        """Commits the rest and ends the last part properly."""
        if not self._failed:
            self.commit()
        part, self._part = self._part, None
        if part is not None:
            part.close()

    def __enter__(self) -> OutputWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _part_for(self, message: pa.Buffer) -> PartWriter:
        part = self._part
        if part is not None and part.num_commits and part.size + len(message) > self._max_part_bytes:
            self._part = None
            part.close()
            # the time before was the last part's
            self._origin = dataclasses.replace(self._origin, started=time.time())
            part = None
        if part is None:
            name = new_part_name(self._job, self._origin.worker)
            part = self._part = PartWriter(self._job, name, self._schema.arrow, self._origin)
        return part

    def _account(self, pending: Sequence[Completion]) -> tuple[list[UnitRows], Totals]:
        ordinals = np.array([c.request.payload.row.ordinal for c in pending], np.int64)
        failed = np.array([c.finish_reason is FinishReason.ERROR for c in pending], np.int64)
        keys = [(int(ordinal), c.sample) for ordinal, c in zip(ordinals, pending, strict=True)]
        assert len(set(keys)) == len(keys), "a result came twice"
        retried = np.array([key in self._retrying for key in keys], np.int64)
        self._retrying.difference_update(keys)
        numbers, which = np.unique(self._units.numbers(ordinals), return_inverse=True)
        sums = [np.bincount(which, weights).astype(np.int64) for weights in (None, failed, retried)]
        units = [UnitRows(*row) for row in np.stack([numbers, *sums], axis=1).tolist()]
        finished = [c for c in pending if c.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)]
        totals = Totals(
            rows=len(pending),
            retried=int(retried.sum()),
            errors=int(failed.sum()),
            skipped=sum(c.finish_reason is FinishReason.SKIPPED for c in pending),
            prompt_tokens=sum(len(c.request.prompt_ids) for c in pending),
            completion_tokens=sum(len(c.token_ids) for c in finished),
        )
        return units, totals

    def _size(self, completion: Completion) -> int:
        """About how many bytes a completion will take."""
        request, batch = completion.request, completion.request.payload.row.batch
        text = len(request.prompt or "") + len(completion.text or "")
        tokens = len(request.prompt_ids) * 4 + len(completion.token_ids) * (12 + self._topk_bytes)
        return text + tokens + batch.nbytes // max(batch.num_rows, 1)
