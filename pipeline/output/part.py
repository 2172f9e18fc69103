"""Writing one part: an Arrow IPC stream that grows by whole commits.

Knows: the order of the steps that make rows durable. Refuses to know: what rows mean, other parts.

A commit appends one record batch and forces it to disk, and only then says so in the journal and forces
that too. A crash between the two leaves bytes that no line speaks of; they are void, and since a part
belongs to one process and is never opened again for writing, nobody ever builds on them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from pipeline import durable
from pipeline.output.journal import Closed, Commit, Header, JournalWriter, Totals, UnitRows
from pipeline.output.layout import journal_path, part_name, part_path
from pipeline.store import Store, open_store

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True)
class Origin:
    """Who writes: what a part's header says beside the part itself. started: seconds since 1970."""

    incarnation: str
    worker: str
    fingerprint: str
    started: float
    gpu_hour_usd: float


class PartWriter:
    """One part and its journal from creation to close.

    Any failure leaves the part as the last commit left it, for good: a second attempt could follow bytes
    that are only half there. Raises FullDisk naming the directory, OSError otherwise.
    """

    def __init__(
        self, job: Path, seq: int, schema: pa.Schema, origin: Origin, store: Store | None = None
    ) -> None:
        """seq: the part's place among those of its incarnation."""
        store = store or open_store(job)
        self.name = name = part_name(origin.incarnation, seq)
        self._job = job
        self._totals = Totals()
        self._seq = 0
        self._usable = False
        with durable.full_disk_named(job):
            message = schema.serialize()
            path = part_path(job, name)
            self._file = store.append(path)
            self._file.write(memoryview(message))
            self._file.sync()
            self._file.sync_name()
            self.size = len(message)
            header = Header(
                part=name,
                incarnation=origin.incarnation,
                worker=origin.worker,
                fingerprint=origin.fingerprint,
                schema=schema_hash(schema),
                offset=self.size,
                sha256=hashlib.sha256(message).hexdigest(),
                started=origin.started,
                time=time.time(),
                gpu_hour_usd=origin.gpu_hour_usd,
            )
            self._journal = JournalWriter(journal_path(job, name), header, store)
        self._usable = True

    @property
    def num_commits(self) -> int:
        return self._seq

    def commit(self, message: pa.Buffer, units: Sequence[UnitRows], added: Totals) -> Commit:
        """Makes one record batch, as its IPC message, part of the output.

        units: which units its rows belong to. added: what it adds to the part's totals.
        """
        assert self._usable, f"part {self.name} failed or is closed and takes no more rows"
        self._usable = False
        commit = Commit(
            seq=self._seq,
            offset=self.size + len(message),
            rows=added.rows,
            sha256=hashlib.sha256(message).hexdigest(),
            units=tuple(units),
            totals=self._totals + added,
            time=time.time(),
        )
        with durable.full_disk_named(self._job):
            self._file.write(memoryview(message))
            # before the journal: a line must never speak of bytes that a power cut can still take
            self._file.sync()
            self._journal.append(commit)
        self.size, self._seq, self._totals = commit.offset, self._seq + 1, commit.totals
        self._usable = True
        return commit

    def close(self) -> None:
        """Ends the stream so that any Arrow reader takes the part; a failed part is only let go."""
        usable, self._usable = self._usable, False
        try:
            if usable:
                with durable.full_disk_named(self._job):
                    self._file.write(END_OF_STREAM)
                    self._file.sync()
                    self._journal.append(Closed(self.size + len(END_OF_STREAM), time.time()))
        finally:
            self._journal.close()
            self._file.close()


def schema_hash(schema: pa.Schema) -> str:
    return hashlib.sha256(schema.serialize()).hexdigest()
