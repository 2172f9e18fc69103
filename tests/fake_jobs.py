"""Small jobs without a model: a source of made-up rows, completions that follow from them, faults of disks.

Everything is a function of the row, so that two runs of one job must give the same bytes.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline import durable
from pipeline.cluster.claims import Claims
from pipeline.cluster.processes import Process
from pipeline.cluster.watch import Watch
from pipeline.cluster.work import Work
from pipeline.cluster.workers import Member
from pipeline.config import OutputConfig, ParquetSource
from pipeline.input.rows import Row, RowReader
from pipeline.input.source import BATCH_ROWS, Block, InputIndex, input_file
from pipeline.output.layout import incarnations
from pipeline.output.plan import JobPlan
from pipeline.output.progress import JobDirectory
from pipeline.output.writer import OutputWriter
from pipeline.prompts.prompts import PromptRow
from pipeline.request import Completion, FinishReason, Request, RowError, SamplingParams

PARAMS = SamplingParams()
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("score", pa.float64()),
        ("tags", pa.list_(pa.string())),
        ("kind", pa.dictionary(pa.int8(), pa.string())),
    ]
)


@dataclass
class FakeSource:
    """Files of blocks of made-up rows. Ids repeat, scores are null at first and NaN at times."""

    files: Sequence[Sequence[int]] = ((10, 10, 5), (7,))
    # what a changed source would give: (file, row) -> text
    altered: dict[tuple[int, int], str] = field(default_factory=dict)
    schema: pa.Schema = SCHEMA

    def scan(self) -> InputIndex:
        files = [
            input_file(
                number, f"part-{number}.parquet", 100 + sum(blocks), f"digest-{number}", _located(blocks)
            )
            for number, blocks in enumerate(self.files)
        ]
        return InputIndex(tuple(files), self.schema)

    def check(self, index: InputIndex) -> None:
        if index.files != self.scan().files:
            raise ValueError("the input changed")

    def read(self, block: Block, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for begin in range(0, block.num_rows, BATCH_ROWS):
            rows = range(block.first_row + begin, block.first_row + min(begin + BATCH_ROWS, block.num_rows))
            values = [self._values(block.file, row) for row in rows]
            arrays = [
                pa.array(
                    [value[self.schema.names.index(name)] for value in values], self.schema.field(name).type
                )
                for name in columns
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=list(columns))

    def _values(self, file: int, row: int) -> tuple[object, ...]:
        text = self.altered.get((file, row), f"text {file}/{row}")
        score = None if row < 5 else float("nan") if row % 7 == 0 else row / 2
        return f"id{row % 3}", text, score, None if row % 4 == 0 else ["a", text], f"kind{row % 2}"


def _located(blocks: Sequence[int]) -> list[tuple[int, int | None]]:
    return list(zip(blocks, range(len(blocks)), strict=True))


def plan(
    source: FakeSource,
    samples: int = 1,
    unit_rows: int = 4,
    shuffle: bool = False,
    fingerprint: dict[str, object] | None = None,
    **output: object,
) -> JobPlan:
    return JobPlan(
        source=ParquetSource(path="unused", unit_rows=unit_rows, shuffle=shuffle),
        output=OutputConfig(dir="unused", **output),  # type: ignore[arg-type]
        seed=7,
        samples=samples,
        fingerprint=fingerprint or {"sampling.temperature": 0.7},
        provenance={"version": "0.1.0"},
    )


def complete(row: Row, sample: int, failing: Callable[[int], bool] = lambda ordinal: False) -> Completion:
    """What a model would make of a row: a function of row and sample."""
    request = Request(
        key=row.key,
        prompt_ids=np.arange(row.key.row % 5 + 1, dtype=np.int32),
        params=PARAMS,
        prompt=f"say {row.key}",
        payload=PromptRow(row, 0),
    )
    if failing(row.ordinal):
        return Completion(request, sample, FinishReason.ERROR, error=RowError("made_up", "on purpose"))
    if row.key.row % 11 == 10:
        return Completion(request, sample, FinishReason.SKIPPED)
    ids = np.arange(row.key.row % 3 + 1, dtype=np.int32) + sample
    return Completion(
        request,
        sample,
        FinishReason.STOP,
        ids,
        f"said {row.key} {sample}",
        logprobs=np.full(len(ids), -0.5, np.float32),
        topk_ids=np.stack([ids, ids + 1], axis=1),
        topk_logprobs=np.log(np.full((len(ids), 2), 0.25, np.float32)),
    )


def gone() -> Process:
    """A process that is over, as everybody on this machine can see."""
    current = Process.current()
    # above the largest that Linux gives
    return dataclasses.replace(current, pid=2**22 + 1)


@dataclass
class Worker:
    """One incarnation at work on a directory, in the caller's thread."""

    directory: JobDirectory
    member: Member
    watch: Watch
    claims: Claims
    source: FakeSource
    writer: OutputWriter

    @classmethod
    def on(
        cls,
        directory: JobDirectory,
        source: FakeSource,
        incarnation: str,
        process: Process | None = None,
        lease_s: float = 60.0,
        max_part_bytes: int = 512 * 2**20,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> Worker:
        """process: None stands for one that is over as soon as it is looked at. options: of Claims."""
        store, path, name = directory.store, directory.path, incarnation.rpartition(".")[0] or incarnation
        member = Member(store, path, name, process or gone(), incarnation=incarnation, clock=clock)
        member.join()
        watch = Watch(store, path, member, lease_s, clock)
        claims = Claims(directory, member, watch, clock=clock, **options)
        output = OutputConfig(dir=str(path), commit_interval_s=1e9, max_part_bytes=max_part_bytes)
        writer = directory.writer(output, claims, incarnation, name)
        return cls(directory, member, watch, claims, source, writer)

    def rows(self) -> Iterator[tuple[Row, int]]:
        """What there is to do for this worker, waiting where others decide."""
        reader = RowReader(self.source, self.directory.order, self.directory.index.schema.names)
        for claim in Work(self.claims):
            for wanted in claim.ranges():
                for row in reader.rows(wanted):
                    yield from ((row, sample) for sample in claim.samples(row))


@dataclass
class Run:
    """One start of a job, for as many results as wanted, committing every few."""

    path: Path
    source: FakeSource
    plan: JobPlan
    commit_every: int = 3
    retry_errors: bool = False
    failing: Callable[[int], bool] = lambda ordinal: False
    max_part_bytes: int = 512 * 2**20
    # how many results the last start was told are safe
    acknowledged: int = 0

    def start(self, stop_after: int | None = None) -> list[tuple[int, int]]:
        """Generates what is left, or `stop_after` results and then vanishes without a word.

        Returns the (ordinal, sample) that were generated.
        """
        self.acknowledged = 0
        # each start is an incarnation of its own: w0, w1, ...
        incarnation = f"w{len(incarnations(self.path))}"
        index = JobDirectory.stored_index(self.path) or self.source.scan()
        directory = JobDirectory.open(self.path, self.plan, index)
        options = {"retry_errors": self.retry_errors, "max_part_bytes": self.max_part_bytes}
        with durable.full_disk_named(self.path):
            worker = Worker.on(directory, self.source, incarnation, **options)
        writer, made = worker.writer, list[tuple[int, int]]()
        try:
            for row, sample in worker.rows():
                if len(made) == stop_after:
                    return made
                assert writer.append(complete(row, sample, self.failing))
                made.append((row.ordinal, sample))
                if len(made) % self.commit_every == 0:
                    writer.commit()
            writer.close()
            return made
        finally:
            self.acknowledged = writer.num_committed


class Crash(BaseException):
    """The end of a process as its own code sees it: no handler for errors is to catch it."""


class Disk:
    """Stands in for the operations of `durable` and ends the process before or after the n-th of them.

    `power_cut` then takes away what no fsync had made durable: the tails of files, and whole new names.
    """

    STEPS = ("create", "write", "fsync_file", "fsync_directory", "rename", "link")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path, crash_at: int | None = None) -> None:
        self.steps: list[str] = []
        self._root = root
        self._crash_at = crash_at
        self._synced: dict[Path, int] = {}
        self._named: set[Path] = set(root.rglob("*")) if root.exists() else set()
        self._before = set(self._named)
        for name in self.STEPS:
            monkeypatch.setattr(durable, name, self._watched(name, getattr(durable, name)))

    def _watched(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object) -> object:
            self._tick(name, "before")
            result = real(*arguments)
            if name == "fsync_file":
                path = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
                self._synced[path] = path.stat().st_size
            if name == "fsync_directory":
                self._named.update(Path(str(arguments[0])).iterdir())
            if name in ("rename", "link"):
                self._synced[Path(str(arguments[1]))] = self._synced.get(Path(str(arguments[0])), 0)
            self._tick(name, "after")
            return result

        return step

    def _tick(self, name: str, when: str) -> None:
        if self._crash_at is not None and len(self.steps) >= self._crash_at:
            # a dead process does nothing more, whatever its handlers try
            raise Crash(f"{when} {name}")
        self.steps.append(f"{when} {name}")

    def power_cut(self) -> None:
        folders = ("parts", "journal", "leases", "workers")
        files = [path for folder in folders for path in (self._root / folder).rglob("*") if path.is_file()]
        for path in files:
            if path in self._before:
                continue
            if path not in self._named:
                path.unlink()
            else:
                os.truncate(path, min(path.stat().st_size, self._synced.get(path, 0)))
