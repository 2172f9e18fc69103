"""A job's directory: made, or opened to go on with it.

Knows: `job.json`, `input.arrow`, what may follow on what. Refuses to know: who works on it (`cluster`),
engines, prompts, how rows are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from pipeline import durable
from pipeline.config import OutputConfig
from pipeline.input.source import InputIndex
from pipeline.output.fingerprint import refuse_difference
from pipeline.output.layout import INPUT_FILE, JOB_FILE, JOURNAL, LEASES, PARTS, journal_names, part_names
from pipeline.output.ledger import Ledger
from pipeline.output.part import Origin
from pipeline.output.plan import JobPlan
from pipeline.output.published import Published
from pipeline.output.stored import StoredRows
from pipeline.output.writer import OutputWriter, Ownership
from pipeline.store import Store, open_store


class JobDirectory:
    """One job on disk. `open` to work on it, `load` to look at it."""

    def __init__(self, path: Path, plan: JobPlan, index: InputIndex, store: Store | None = None) -> None:
        self.path = path
        self.plan = plan
        self.index = index
        self.order = plan.order(index)
        self.units = self.order.units(plan.source.unit_rows)
        self.schema = plan.schema(index)
        self.store = store or open_store(path)

    @classmethod
    def open(
        cls,
        path: str | Path,
        plan: JobPlan,
        index: InputIndex,
        alone: Callable[[], bool] = lambda: True,
        store: Store | None = None,
    ) -> JobDirectory:
        """Starts the job in `path`, or goes on with it. Any number of processes may do so at once.

        A resumed job keeps the units and the provenance it started with. A job that never wrote anything
        gives way to another one, while nobody works on it: `alone` is asked then. Raises ValueError if the
        directory holds another job (naming each difference), FullDisk, OSError.
        """
        path = Path(path)
        store = store or open_store(path)
        # wrong settings are said before anything is made
        plan.schema(index)
        with durable.full_disk_named(path):
            store.make_folder(path)
            if not store.exists(path / JOB_FILE) and _create(path, plan, index, store):
                return cls(path, plan, index, store)
            # the process that made the job may have died before its names were on disk; this sees to it
            store.make_folder(path / LEASES)
            if _gives_way(path, plan, index, store) and alone():
                store.replace(path / INPUT_FILE, index.encode())
                store.replace(path / JOB_FILE, plan.encode())
            return cls(path, *_resume(path, plan, index, store), store)

    @classmethod
    def load(cls, path: str | Path, store: Store | None = None) -> JobDirectory:
        """Raises ValueError if there is no job, or its files are damaged."""
        path = Path(path)
        store = store or open_store(path)
        plan = JobPlan.read(path, store)
        index = cls.stored_index(path, store)
        assert index is not None
        return cls(path, plan, index, store)

    @staticmethod
    def refuse_another(path: str | Path, plan: JobPlan, store: Store | None = None) -> None:
        """Raises ValueError, naming each key that differs, if `path` holds another job than `plan`."""
        refuse_difference(Path(path), JobPlan.read(Path(path), store).fingerprint, plan.fingerprint)

    @staticmethod
    def stored_index(path: str | Path, store: Store | None = None) -> InputIndex | None:
        """The index of a job's input as scanned at its start; None if there is no job yet."""
        store = store or open_store(path)
        if not store.exists(Path(path) / JOB_FILE):
            return None
        file = Path(path) / INPUT_FILE
        try:
            return InputIndex.decode(store.read(file))
        except (OSError, pa.ArrowInvalid, KeyError) as error:
            raise ValueError(
                f"{file} is missing or damaged ({error}): restore it, or choose another output.dir"
            ) from error

    @staticmethod
    def has_output(path: str | Path, store: Store | None = None) -> bool:
        """Whether a process came as far as to write rows: until then a directory binds nobody."""
        return bool(part_names(Path(path), store) or journal_names(Path(path), store))

    @property
    def num_rows(self) -> int:
        return self.order.num_rows

    @property
    def samples(self) -> int:
        return self.plan.samples

    @property
    def num_results(self) -> int:
        """Results the whole job consists of: rows times samples."""
        return self.num_rows * self.samples

    def stored(self) -> StoredRows:
        """What is committed at this moment, and counts."""
        ledger = Ledger.read(self.path, self.store)
        return StoredRows(ledger, self.order, self.samples, Published.read(self.store, self.path).sharded())

    def writer(
        self,
        output: OutputConfig,
        ownership: Ownership,
        incarnation: str,
        worker: str,
        started: float | None = None,
        gpu_hour_usd: float = 0.0,
    ) -> OutputWriter:
        """Takes the completions of one process. started: since when it costs money (time.time)."""
        origin = Origin(
            incarnation=incarnation,
            worker=worker,
            fingerprint=self.plan.digest,
            started=time.time() if started is None else started,
            gpu_hour_usd=gpu_hour_usd,
        )
        return OutputWriter(self.path, self.schema, origin, output, ownership, self.store)


def _create(path: Path, plan: JobPlan, index: InputIndex, store: Store) -> bool:
    """Makes the job; False if another process was first."""
    # asked again after the parts: another process may have made the job and begun it meanwhile
    if part_names(path, store) and not store.exists(path / JOB_FILE):
        raise ValueError(
            f"output.dir={path} holds parts but no {JOB_FILE}: restore it, or choose another output.dir"
        )
    for name in (PARTS, JOURNAL, LEASES):
        store.make_folder(path / name)
    store.replace(path / INPUT_FILE, index.encode())
    # last, since a directory with a job.json is a whole job; its fsync covers the names above
    return store.create_new(path / JOB_FILE, plan.encode())


def _gives_way(path: Path, plan: JobPlan, index: InputIndex, store: Store) -> bool:
    """Whether `path` holds another job that never wrote a row: one that was mistyped, say."""
    if JobDirectory.has_output(path, store):
        return False
    stored = JobDirectory.stored_index(path, store)
    assert stored is not None
    return JobPlan.read(path, store).fingerprint != plan.fingerprint or stored.files != index.files


def _resume(path: Path, plan: JobPlan, index: InputIndex, store: Store) -> tuple[JobPlan, InputIndex]:
    old = JobPlan.read(path, store)
    refuse_difference(path, old.fingerprint, plan.fingerprint)
    old_index = JobDirectory.stored_index(path, store)
    assert old_index is not None
    if index.files != old_index.files:
        _require_appended(path, plan, old_index, index)
        store.replace(path / INPUT_FILE, index.encode())
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
