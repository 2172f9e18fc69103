"""The small job that simulated workers do, and who they are.

Knows: values. Refuses to know: what befalls them (`simulator.py`), what they do (`simulated_worker.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from cluster.schedule import Life
from fake_jobs import FakeSource, plan

from pipeline.cluster.claims import Verdict
from pipeline.cluster.processes import Process, SlurmTask
from pipeline.input.rows import Row, read_rows
from pipeline.output.progress import JobDirectory

_FILES = ((10, 10, 5), (7,))


@dataclass(frozen=True)
class Shape:
    """A job's form."""

    unit_rows: int
    samples: int
    shuffle: bool


@lru_cache
def job_of(shape: Shape) -> tuple[JobDirectory, list[Row]]:
    """The job and all of its rows, by ordinal. Nothing is on a disk yet."""
    source = FakeSource(_FILES)
    job_plan = plan(source, samples=shape.samples, unit_rows=shape.unit_rows, shuffle=shape.shuffle)
    index = source.scan()
    directory = JobDirectory("unused", job_plan, index)  # type: ignore[arg-type]
    everything = [range(directory.num_rows)]
    return directory, list(read_rows(source, directory.order, everything, index.schema.names))


@dataclass(eq=False)
class Host:
    name: str
    boots: int = 0
    # how far its clocks are off
    monotonic: float = 0.0
    wall: float = 0.0


@dataclass(eq=False)
class Worker(Life):
    """One incarnation."""

    host: Host = field(default_factory=lambda: Host("none"))
    process: Process | None = None
    slurm: SlurmTask | None = None
    incarnation: str = ""
    told_to_leave: bool = False
    hangs_s: float = 0.0
    over: bool = False
    verdict: Verdict | None = None
