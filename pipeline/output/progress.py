"""A job's directory: made or resumed, and what is still to do in it.

Knows: `job.json`, `input.arrow`, and from the journals which results are there. Refuses to know: engines,
prompts, how rows are read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline import durable
from pipeline.config import OutputConfig
from pipeline.input.order import Unit
from pipeline.input.rows import Row
from pipeline.input.source import InputIndex
from pipeline.output.fingerprint import refuse_difference
from pipeline.output.keys import ranges_of
from pipeline.output.layout import INPUT_FILE, JOB_FILE, JOURNAL, PARTS, journal_names, part_names
from pipeline.output.ledger import Ledger
from pipeline.output.part import Origin
from pipeline.output.plan import JobPlan
from pipeline.output.stored import StoredRows, StoredUnit
from pipeline.output.writer import OutputWriter

_LOCK_FILE = ".lock"


class JobDirectory:
    """One job on disk. `open` to work on it, `load` to look at it."""

    def __init__(self, path: Path, plan: JobPlan, index: InputIndex, lock: int | None = None) -> None:
        self.path = path
        self.plan = plan
        self.index = index
        self.order = plan.order(index)
        self.units = self.order.units(plan.source.unit_rows)
        self.schema = plan.schema(index)
        self._lock = lock

    @classmethod
    def open(cls, path: str | Path, plan: JobPlan, index: InputIndex) -> JobDirectory:
        """Starts the job in `path`, or goes on with it.

        A resumed job keeps the units and the provenance it started with. A job that never wrote anything
        gives way to another one. Raises ValueError if the directory holds another job (naming each
        difference) or is being worked on, FullDisk, OSError.
        """
        path = Path(path)
        # wrong settings are said before anything is made
        plan.schema(index)
        with durable.full_disk_named(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
            try:
                if (path / JOB_FILE).exists() and not _gives_way(path, plan, index):
                    plan, index = _resume(path, plan, index)
                else:
                    _create(path, plan, index)
                return cls(path, plan, index, lock)
            except BaseException:
                os.close(lock)
                raise

    @classmethod
    def load(cls, path: str | Path) -> JobDirectory:
        """Raises ValueError if there is no job, or its files are damaged."""
        path = Path(path)
        plan = JobPlan.read(path)
        index = cls.stored_index(path)
        assert index is not None
        return cls(path, plan, index)

    @staticmethod
    def refuse_another(path: str | Path, plan: JobPlan) -> None:
        """Raises ValueError, naming each key that differs, if `path` holds another job than `plan`."""
        refuse_difference(Path(path), JobPlan.read(Path(path)).fingerprint, plan.fingerprint)

    @staticmethod
    def stored_index(path: str | Path) -> InputIndex | None:
        """The index of a job's input as scanned at its start; None if there is no job yet."""
        if not (Path(path) / JOB_FILE).exists():
            return None
        file = Path(path) / INPUT_FILE
        try:
            return InputIndex.load(file)
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise ValueError(
                f"{file} is missing or damaged ({error}): restore it, or choose another output.dir"
            ) from error

    @staticmethod
    def has_output(path: str | Path) -> bool:
        """Whether a process came as far as to write rows: until then a directory binds nobody."""
        return bool(part_names(Path(path)) or journal_names(Path(path)))

    @property
    def num_rows(self) -> int:
        return self.order.num_rows

    @property
    def samples(self) -> int:
        return self.plan.samples

    def stored(self) -> StoredRows:
        """What is committed at this moment."""
        return StoredRows(Ledger.read(self.path), self.order, self.samples)

    def remaining(self, retry_errors: bool = False) -> Remaining:
        """What is still to do, as of now. retry_errors: rows that ended as errors are to do again."""
        return Remaining(self, self.stored(), retry_errors)

    def writer(
        self,
        output: OutputConfig,
        remaining: Remaining,
        worker: str = "w0",
        started: float | None = None,
        gpu_hour_usd: float = 0.0,
    ) -> OutputWriter:
        """Takes the completions of `remaining`. started: since when this process costs money (time.time)."""
        origin = Origin(
            worker=worker,
            epoch=remaining.epoch,
            fingerprint=self.plan.digest,
            started=time.time() if started is None else started,
            gpu_hour_usd=gpu_hour_usd,
        )
        return OutputWriter(self.path, self.schema, self.units, origin, output, remaining.retrying)

    def close(self) -> None:
        """Lets others work on the directory; the end of the process does so too."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class Remaining:
    """What a start of the job has to do, found lazily, unit by unit.

    `ranges` yields ordinals; `samples` tells, for a row of these, which of its samples are missing.
    retrying: (ordinal, sample) handed out a second time because they ended as errors.
    """

    def __init__(self, job: JobDirectory, stored: StoredRows, retry_errors: bool) -> None:
        self._job = job
        self._stored = stored
        self._retry_errors = retry_errors
        self._every = tuple(range(job.samples))
        self._some: dict[int, tuple[int, ...]] = {}
        self._rows, self._errors = stored.ledger.sums(max(len(job.units), stored.ledger.num_units))
        self.epoch = stored.ledger.next_epoch
        self.retrying: set[tuple[int, int]] = set()

    @property
    def num_results(self) -> int:
        """How many results are to be made."""
        done = int(self._rows.sum()) - (int(self._errors.sum()) if self._retry_errors else 0)
        return self._job.num_rows * self._job.samples - done

    def ranges(self) -> Iterator[range]:
        """Ordinals of rows that lack something, ascending. Complete units cost nothing."""
        for unit in self._job.units:
            num_results = (unit.stop - unit.start) * self._job.samples
            to_retry = self._retry_errors and self._errors[unit.number] > 0
            if self._rows[unit.number] == 0:
                yield range(unit.start, unit.stop)
            elif self._rows[unit.number] != num_results or to_retry:
                yield from self._partly(unit)

    def samples(self, row: Row) -> tuple[int, ...]:
        """Which samples of this row are missing; to be asked once, after `ranges` yielded the row."""
        return self._some.pop(row.ordinal, self._every)

    def _partly(self, unit: Unit) -> Iterator[range]:
        stored = self._stored.unit(unit)
        missing = ~stored.done(count_errors=not self._retry_errors).reshape(-1, self._job.samples)
        if self._retry_errors:
            self._note_retries(unit, stored)
        rows = np.flatnonzero(missing.any(axis=1))
        for row in rows[~missing[rows].all(axis=1)]:
            self._some[unit.start + int(row)] = tuple(np.flatnonzero(missing[row]).tolist())
        for start, stop in ranges_of(rows):
            yield range(unit.start + start, unit.start + stop)

    def _note_retries(self, unit: Unit, stored: StoredUnit) -> None:
        for slot in stored.slots[stored.current & stored.failed].tolist():
            row, sample = divmod(slot, self._job.samples)
            self.retrying.add((unit.start + row, sample))


def _create(path: Path, plan: JobPlan, index: InputIndex) -> None:
    if part_names(path):
        raise ValueError(
            f"output.dir={path} holds parts but no {JOB_FILE}: restore it, or choose another output.dir"
        )
    for name in (PARTS, JOURNAL):
        (path / name).mkdir(exist_ok=True)
    index.save(path / INPUT_FILE)
    # last, since a directory with a job.json is a whole job; its fsync covers the names above
    plan.write(path)
    durable.fsync_directory(path.parent)


def _gives_way(path: Path, plan: JobPlan, index: InputIndex) -> bool:
    """Whether `path` holds another job that never wrote a row: one that was mistyped, say."""
    if JobDirectory.has_output(path):
        return False
    stored = JobDirectory.stored_index(path)
    assert stored is not None
    return JobPlan.read(path).fingerprint != plan.fingerprint or stored.files != index.files


def _resume(path: Path, plan: JobPlan, index: InputIndex) -> tuple[JobPlan, InputIndex]:
    old = JobPlan.read(path)
    refuse_difference(path, old.fingerprint, plan.fingerprint)
    old_index = JobDirectory.stored_index(path)
    assert old_index is not None
    if index.files != old_index.files:
        _require_appended(path, plan, old_index, index)
        index.save(path / INPUT_FILE)
        durable.fsync_directory(path)
    return old, index


def _require_appended(path: Path, plan: JobPlan, old: InputIndex, new: InputIndex) -> None:
    """Raises ValueError unless `new` is `old` with more files behind it, and this is wanted."""
    count = len(old.files)
    for before, after in zip(old.files, new.files, strict=False):
        if before != after:
            what = f"file {before.index} was {before.path} ({before.num_rows} rows, {before.size} bytes)"
            now = f"is {after.path} ({after.num_rows} rows, {after.size} bytes)"
            raise ValueError(f"the input of output.dir={path} changed: {what}, {now}: restore it")
    if len(new.files) < count:
        raise ValueError(f"the input of output.dir={path} lost {old.files[len(new.files)].path}: restore it")
    if not plan.source.allow_append:
        raise ValueError(
            f"the input of output.dir={path} has new files, the first {new.files[count].path}: set "
            "source.allow_append=true to add them"
        )
    if plan.source.shuffle:
        raise ValueError(
            "source.allow_append=true cannot add files to a shuffled job, new rows would move the old ones: "
            "set source.allow_append=false, or start with source.shuffle=false in another output.dir"
        )


def _lock(path: Path) -> int:
    """Keeps a second process of this host out: both would generate, and commit, every row."""
    descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 100).decode(errors="replace").strip()
        os.close(descriptor)
        raise ValueError(
            f"output.dir={path} is worked on by process {owner or 'unknown'}: wait for it, or stop it first"
        ) from None
    except OSError:
        # a file system without locks; the guard is for slips of the hand, nothing rests on it
        return descriptor
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
