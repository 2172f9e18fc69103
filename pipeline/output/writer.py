"""Completions -> parts: collects what finished and commits it every few seconds.

Knows: when to commit, when a part is full, which units and retries a commit speaks of. Refuses to know:
what makes a commit durable (`part.py`), who owns a unit, where completions come from.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from pipeline.config import OutputConfig
from pipeline.output.encode import encode
from pipeline.output.journal import Totals, UnitRows
from pipeline.output.part import Origin, PartWriter
from pipeline.output.schema import OutputSchema
from pipeline.request import Completion, FinishReason
from pipeline.store import Store, is_remote, open_store

# What may wait in memory for the next commit, whatever the interval.
_MAX_PENDING_BYTES = 64 * 2**20
_MAX_PENDING_ROWS = 16384


class Kept(NamedTuple):
    """A result that is to be kept: of which unit, under which fence, and whether it voids an error."""

    unit: int
    fence: int
    retried: bool


class Ownership(Protocol):
    """Whose the results are. commit_lock: held during a commit, so that none is under way at a claim."""

    @property
    def commit_lock(self) -> AbstractContextManager[Any]: ...

    def finish(self, ordinal: int, sample: int) -> Kept | None:
        """Called once a result is there; None if it is not kept: its unit is lost, or it came before."""

    def lost(self, leases: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
        """Which of these (unit, fence) somebody else has taken over."""

    def committed(self) -> None:
        """Called when all that was finished is durable."""


class _Pending(NamedTuple):
    completion: Completion
    kept: Kept

    @property
    def lease(self) -> tuple[int, int]:
        return self.kept.unit, self.kept.fence

    @property
    def key(self) -> tuple[int, int]:
        return self.completion.request.payload.row.ordinal, self.completion.sample


class OutputWriter:
    """Takes completions of one process; what `commit` returned from is there for good.

    As a context manager it commits on the way out, also when an error passes by, so that finished rows
    survive it. After an error of its own it takes nothing more: start the job again. Safe to use from several
    threads.
    """

    def __init__(
        self,
        job: Path,
        schema: OutputSchema,
        origin: Origin,
        output: OutputConfig,
        ownership: Ownership,
        store: Store | None = None,
    ) -> None:
        self._job = job
        self._schema = schema
        self._origin = origin
        self._interval = output.upload_interval_s if is_remote(job) else output.commit_interval_s
        self._max_part_bytes = output.max_part_bytes
        self._topk_bytes = output.topk * 8
        self._ownership = ownership
        self._store = store or open_store(job)
        # guards all that follows
        self._lock = threading.RLock()
        self._part: PartWriter | None = None
        self._num_parts = 0
        self._pending: list[_Pending] = []
        self._pending_bytes = 0
        self._last_commit = time.monotonic()
        self._failed = False
        self.num_committed = 0

    def append(self, completion: Completion) -> bool:
        """Keeps a completion for the next commit, which may be now. Its payload is a PromptRow.

        False if it is not to be kept: another worker makes it, or it is there already.
        """
        with self._lock:
            return self._append(completion)

    def _append(self, completion: Completion) -> bool:
        kept = self._ownership.finish(completion.request.payload.row.ordinal, completion.sample)
        if kept is None:
            return False
        assert not self._failed, "output failed and takes no more rows"
        self._pending.append(_Pending(completion, kept))
        self._pending_bytes += self._size(completion)
        full = self._pending_bytes >= min(_MAX_PENDING_BYTES, self._max_part_bytes)
        if full or len(self._pending) >= _MAX_PENDING_ROWS:
            self.commit()
        else:
            self.commit_if_due()
        return True

    def commit_if_due(self) -> None:
        """Commits if the interval has passed; for a loop that goes on while no row ends."""
        with self._lock:
            # if another thread's commit failed, that thread says so
            due = time.monotonic() - self._last_commit >= self._interval
            if self._pending and due and not self._failed:
                self._commit()

    def commit(self) -> None:
        """Makes all completions so far durable. Raises FullDisk, OSError."""
        with self._lock:
            self._commit()

    def _commit(self) -> None:
        self._last_commit = time.monotonic()
        if not self._pending:
            return
        assert not self._failed, "output failed and takes no more rows"
        # until it is over, nobody knows how much of this commit is on disk
        self._failed = True
        with self._ownership.commit_lock:
            # saves writing what would be void: by now another worker may have begun it again
            lost = self._ownership.lost({pending.lease for pending in self._pending})
            ours = sorted((p for p in self._pending if p.lease not in lost), key=lambda p: p.key)
            if ours:
                message = encode(self._schema, [pending.completion for pending in ours]).serialize()
                self._part_for(message).commit(message, *_account(ours))
        self.num_committed += len(ours)
        self._pending, self._pending_bytes = [], 0
        self._failed = False
        self._ownership.committed()

    def close(self) -> None:
        """Commits the rest and ends the last part properly."""
        with self._lock:
            if not self._failed:
                self._commit()
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
            self._num_parts += 1
            part = self._part = PartWriter(
                self._job, self._num_parts - 1, self._schema.arrow, self._origin, self._store
            )
        return part

    def _size(self, completion: Completion) -> int:
        """About how many bytes a completion will take."""
        request, batch = completion.request, completion.request.payload.row.batch
        text = len(request.prompt or "") + len(completion.text or "")
        tokens = len(request.prompt_ids) * 4 + len(completion.token_ids) * (12 + self._topk_bytes)
        return text + tokens + batch.nbytes // max(batch.num_rows, 1)


def _account(pending: Sequence[_Pending]) -> tuple[list[UnitRows], Totals]:
    """What the journal says of a commit: its units, and what it adds to the part's totals."""
    completions = [p.completion for p in pending]
    assert len({p.key for p in pending}) == len(pending), "a result came twice"
    failed = np.array([c.finish_reason is FinishReason.ERROR for c in completions], np.int64)
    retried = np.array([p.kept.retried for p in pending], np.int64)
    numbers, which = np.unique([p.kept.unit for p in pending], return_inverse=True)
    sums = [np.bincount(which, weights).astype(np.int64) for weights in (None, failed, retried)]
    units = [UnitRows(*row) for row in np.stack([numbers, *sums], axis=1).tolist()]
    finished = [c for c in completions if c.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)]
    totals = Totals(
        rows=len(pending),
        retried=int(retried.sum()),
        errors=int(failed.sum()),
        skipped=sum(c.finish_reason is FinishReason.SKIPPED for c in completions),
        prompt_tokens=sum(len(c.request.prompt_ids) for c in completions),
        completion_tokens=sum(len(c.token_ids) for c in finished),
    )
    return units, totals
