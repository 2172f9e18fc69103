"""What a job's books cost as it grows: `python benchmarks/cluster_scale.py [--units 10000 100000]`.

Plans, leases, reports, looks at and proves jobs of many units with stub workers in one process: no model, 100
rows a unit, 100 units a worker. Leases, worker records, parts and journals are written by the code that jobs
use; rows hold their keys and nothing else, a commit each unit. Forcing things to disk is switched off while a
job is filled, and on where a claim is timed. Every measurement runs in a process of its own, for its memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.cluster.claims import Claim, Claims
from pipeline.cluster.processes import Process
from pipeline.cluster.watch import Watch
from pipeline.cluster.workers import Member
from pipeline.config import OutputConfig, ParquetSource
from pipeline.input.source import open_source
from pipeline.output.chains import Lease, Leases
from pipeline.output.journal import Totals, UnitRows
from pipeline.output.part import Origin, PartWriter
from pipeline.output.plan import JobPlan
from pipeline.output.progress import JobDirectory
from pipeline.output.verify import verify
from pipeline.status import status
from pipeline.store import open_store

ROWS_PER_UNIT = 100
UNITS_PER_WORKER = 100
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)
_MOST_CLAIMS = 100
# Of a job's units at most this share is claimed to take the time of it.
_CLAIMS_SHARE = 1 / 200
_ROW_GROUP = 100_000
_TOKENS_PER_ROW = 64
_COUNTED = ("names", "exists", "size", "read", "view", "create_new", "replace", "settle")


@dataclasses.dataclass(frozen=True)
class Measured:
    """seconds: of wall time; cpu_s: of the processor's. megabytes: what the process grew by, at its most.
    facts: whatever else."""

    seconds: float
    cpu_s: float
    megabytes: float
    facts: dict[str, Any]


def make_input(folder: Path, num_units: int) -> None:
    num_rows = num_units * ROWS_PER_UNIT
    table = pa.table({"prompt": pa.DictionaryArray.from_arrays(np.zeros(num_rows, np.int32), ["?"])})
    pq.write_table(table, folder / "rows.parquet", row_group_size=_ROW_GROUP)


def plan(folder: Path) -> dict[str, Any]:
    """Scans the input and makes the job's directory."""
    source = ParquetSource(path=str(folder / "rows.parquet"), unit_rows=ROWS_PER_UNIT)
    output = OutputConfig(dir=str(folder / "job"), columns=[], prompt=False)
    job_plan = JobPlan(source, output, seed=0, samples=1, fingerprint={"benchmark": "cluster_scale"})
    directory = JobDirectory.open(folder / "job", job_plan, open_source(source).scan())
    return {"units": len(directory.units), "rows": directory.num_rows}


class StubWorkers:
    """The workers of a job, each with a hundred neighbouring units: unit u is worker u // 100's."""

    def __init__(self, folder: Path) -> None:
        self.directory = JobDirectory.load(folder / "job")
        self.leases = Leases(self.directory.store, self.directory.path)
        self.num_workers = -(-len(self.directory.units) // UNITS_PER_WORKER)

    def fill(self, begin: float, end: float) -> None:
        """Takes each worker's units from one share to another; commits them, the last but at the end."""
        fences = self.leases.fences(len(self.directory.units))
        first, last = (round(share * UNITS_PER_WORKER) for share in (begin, end))
        for worker in range(self.num_workers):
            units = range(worker * UNITS_PER_WORKER, (worker + 1) * UNITS_PER_WORKER)
            units = units[: len(self.directory.units) - units.start]
            name = f"stub-{worker:05d}.00000000"
            for unit in units[first:last]:
                if fences[unit] < 0:
                    assert self.leases.create(Lease(unit, 0, name, None, None, time.time()))
            # each is at work on the last one that it took
            done = [unit for unit in units[max(first - 1, 0) : last - 1] if self._is_mine(unit, name)]
            self._report(name, LEVELS.index(end), done)
            self._beat(worker, name, units[last - 1 : last])

    def finish(self) -> None:
        """Commits what is left, and every worker leaves."""
        for incarnation, units in self._left().items():
            self._report(incarnation, len(LEVELS) + 1, units)
            _member(self.directory, incarnation).leave("done")

    def _left(self) -> dict[str, list[int]]:
        rows, _ = self.directory.stored().ledger.sums(len(self.directory.units))
        left: dict[str, list[int]] = {}
        for unit in np.flatnonzero(rows == 0).tolist():
            holder = self.leases.lease(unit, 0).incarnation
            assert holder is not None
            left.setdefault(holder, []).append(unit)
        return left

    def _is_mine(self, unit: int, name: str) -> bool:
        return self.leases.lease(unit, 0).incarnation == name

    def _beat(self, worker: int, name: str, units: Sequence[int]) -> None:
        member = _member(self.directory, name)
        member.note_loaded()
        member.beat([(unit, True) for unit in units])

    def _report(self, incarnation: str, seq: int, units: Sequence[int]) -> None:
        if not units:
            return
        directory = self.directory
        origin = Origin(incarnation, incarnation.partition(".")[0], directory.plan.digest, time.time(), 1.0)
        part = PartWriter(directory.path, seq, directory.schema.arrow, origin, directory.store)
        for unit in units:
            batch = _rows(directory, unit)
            tokens = batch.num_rows * _TOKENS_PER_ROW
            totals = Totals(batch.num_rows, 0, 0, 0, batch.num_rows, tokens)
            part.commit(batch.serialize(), [UnitRows(unit, batch.num_rows, 0, 0)], totals)
        part.close()


def _rows(directory: JobDirectory, unit: int) -> pa.RecordBatch:
    """A unit's rows with their keys, as if all had ended after so many tokens."""
    _, start, stop = directory.units[unit]
    files, rows = directory.order.keys(start, stop)
    made = {
        "file": files,
        "row": rows,
        "sample": np.zeros(len(rows), np.int32),
        "finish_reason": ["stop"] * len(rows),
        "prompt_tokens": np.ones(len(rows), np.int32),
        "completion_tokens": np.full(len(rows), _TOKENS_PER_ROW, np.int32),
    }
    arrays = [
        pa.array(made[field.name], field.type) if field.name in made else pa.nulls(len(rows), field.type)
        for field in directory.schema.arrow
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=directory.schema.arrow)


def _member(directory: JobDirectory, incarnation: str) -> Member:
    # a machine for each: nobody can see whether another one runs
    worker = incarnation.partition(".")[0]
    process = dataclasses.replace(Process.current(), host=worker)
    return Member(directory.store, directory.path, worker, process, incarnation=incarnation)


@contextmanager
def without_disk() -> Iterator[None]:
    """Nothing is forced to disk meanwhile."""
    with ExitStack() as stack:
        for name in ("fsync_file", "fsync_directory"):
            stack.enter_context(mock.patch(f"pipeline.durable.{name}", lambda _: None))
        yield


def fill(folder: Path, begin: float, end: float) -> dict[str, Any]:
    with without_disk():
        StubWorkers(folder).fill(begin, end)
    return {}


def finish(folder: Path) -> dict[str, Any]:
    with without_disk():
        StubWorkers(folder).finish()
    return {}


def claim(folder: Path, num_claims: int) -> dict[str, Any]:
    """One more worker joins and claims some units, as fast as the disk lets it."""
    directory = JobDirectory.load(folder / "job")
    counts = counting(directory.store)
    member = _member(directory, f"late-{secrets.token_hex(4)}.00000000")
    member.join()
    began = time.perf_counter()
    claims = Claims(directory, member, Watch(directory.store, directory.path, member, 60.0))
    joined = time.perf_counter()
    joining = sum(counts.values())
    number = 0
    while number < num_claims and isinstance(step := claims.advance(), Claim):
        number += 1
    seconds = time.perf_counter() - joined
    # what it took, it makes: the next look shall find an ordinary job
    worker = StubWorkers(folder)
    with without_disk():
        worker._report(member.incarnation, 0, [unit for unit, _ in claims.held()])
        member.leave("done")
    return {
        "join_s": joined - began,
        "join_files": joining,
        "claims": number,
        "ms_per_claim": 1000 * seconds / max(number, 1),
        "files_per_claim": (sum(counts.values()) - joining) / max(number, 1),
        "verdict": None if isinstance(step, Claim) else step.name,
    }


def look(folder: Path) -> dict[str, Any]:
    store = open_store(folder / "job")
    counts = counting(store)
    state = status(folder / "job", store=store)
    return {"done": state.num_done, "workers": len(state.workers), "files": sum(counts.values())}


def is_complete(folder: Path) -> dict[str, Any]:
    """What `finalize` asks of the journals before it begins."""
    directory = JobDirectory.load(folder / "job")
    rows, _ = directory.stored().ledger.sums(len(directory.units))
    return {"complete": int(rows.sum()) == directory.num_results}


def prove(folder: Path) -> dict[str, Any]:
    verdict = verify(folder / "job")
    return {"complete": verdict.complete, "problems": verdict.problems[:3]}


def counting(store: Any) -> dict[str, int]:
    """Counts the store's operations from now on, by name."""
    counts = dict.fromkeys(_COUNTED, 0)
    for name in _COUNTED:
        setattr(store, name, _counted(getattr(store, name), counts, name))
    return counts


def _counted(call: Callable[..., Any], counts: dict[str, int], name: str) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        counts[name] += 1
        return call(*arguments)

    return counted


def measure_job(folder: Path, num_units: int, apart: bool = True) -> dict[str, Measured]:
    """The whole life of a job. apart: each step in a process of its own."""
    steps: dict[str, Measured] = {}
    num_claims = min(_MOST_CLAIMS, round(num_units * _CLAIMS_SHARE))

    def step(name: str, call: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        steps[name] = _apart(call, folder, *arguments) if apart else _timed(call, folder, *arguments)
        if apart:
            print(f"{num_units:,} units, {name}: {_text(steps[name])}", file=sys.stderr, flush=True)

    make_input(folder, num_units)
    step("plan", plan)
    for number, level in enumerate(LEVELS):
        if number:
            step(f"fill to {level:.0%}", fill, LEVELS[number - 1], level)
        step(f"claim at {level:.0%}", claim, num_claims)
        if level == 0.5:
            step("status at half", look)
    step("finish", finish)
    step("status", look)
    step("is complete", is_complete)
    step("verify", prove)
    return steps


def _apart(call: Callable[..., dict[str, Any]], *arguments: Any) -> Measured:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_timed, call, *arguments).result()


def _timed(call: Callable[..., dict[str, Any]], *arguments: Any) -> Measured:
    before = _memory("VmRSS")
    began, cpu_before = time.perf_counter(), time.process_time()
    facts = call(*arguments)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_before
    return Measured(seconds, cpu_s, max(_memory("VmHWM") - before, 0.0), facts)


def _memory(key: str) -> float:
    """Megabytes, as the kernel tells of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def files_of(folder: Path) -> dict[str, int]:
    """How many files the job's folders hold, and megabytes in all."""
    counts: dict[str, int] = {}
    size = 0
    for path in (folder / "job").rglob("*"):
        if path.is_file():
            name = path.relative_to(folder / "job").parts[0]
            counts[name] = counts.get(name, 0) + 1
            size += path.stat().st_size
    return {**counts, "megabytes": size // 2**20}


def table(results: dict[int, dict[str, Measured]]) -> str:
    sizes = sorted(results)
    head = "".join(f"{f'{size:,} units':>36}" for size in sizes)
    lines = [f"{'':<18}{head}{'growth':>10}"]
    for name in results[sizes[0]]:
        cells = [results[size][name] for size in sizes]
        row = "".join(f"{f'{_text(cell)} {cell.megabytes:5,.0f} MB':>36}" for cell in cells)
        growth = _value(cells[-1]) / _value(cells[0])
        lines.append(f"{name:<18}{row}{growth:>9.1f}x")
    return "\n".join(lines)


def _text(cell: Measured) -> str:
    if cell.facts.get("claims"):
        return f"{cell.facts['ms_per_claim']:.2f} ms a claim"
    return f"{cell.seconds:.2f} s (cpu {cell.cpu_s:.2f})"


def _value(cell: Measured) -> float:
    ms: float = cell.facts.get("ms_per_claim", 0.0)
    return ms if cell.facts.get("claims") else cell.cpu_s


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time, memory and files of a job's books.")
    parser.add_argument("--units", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--dir", type=Path, help="on which disk")
    arguments = parser.parse_args(argv)
    results, files = {}, {}
    for num_units in arguments.units:
        folder = Path(tempfile.mkdtemp(dir=arguments.dir))
        try:
            results[num_units] = measure_job(folder, num_units)
            files[num_units] = files_of(folder)
        finally:
            shutil.rmtree(folder)
    print(table(results))
    for num_units, counts in files.items():
        print(f"files of {num_units:,} units: {', '.join(f'{n:,} {name}' for name, n in counts.items())}")
    if arguments.json:
        text = {
            num_units: {
                "files": files[num_units],
                **{name: dataclasses.asdict(step) for name, step in steps.items()},
            }
            for num_units, steps in results.items()
        }
        arguments.json.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
