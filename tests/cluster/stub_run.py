"""`python -m pipeline.run` without a model: the command line, the job and the files are the real ones.

Run as `stub_run.py -m pipeline.VERB arguments...`, in the place of a python. A row takes STUB_ROW_S seconds
and its completion follows from the row alone. Whoever loads the model leaves a line in STUB_LOADS.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config import JobConfig
from pipeline.request import Completion, FinishReason, Request, SamplingParams

_TICK_S = 0.02


@dataclass
class StubStats:
    num_running: int = 0
    num_waiting: int = 0
    kv_use: float = 0.0
    completion_tokens: int = 0
    busy_seconds: float = 0.0


class StubEngine:
    """One row after the other."""

    def __init__(self, row_s: float) -> None:
        self.stats = StubStats()
        self._row_s = row_s

    def generate(
        self,
        requests: Iterable[Request],
        should_stop: Callable[[], bool],
        wanted: Callable[[Request, int], bool],
    ) -> Iterator[Completion]:
        for request in requests:
            for sample in request.samples:
                if not wanted(request, sample):
                    continue
                if not self._spend(should_stop):
                    return
                ids = np.arange(request.key.row % 3 + 1, dtype=np.int32)
                self.stats.completion_tokens += len(ids)
                text = f"said {request.prompt} {sample}"
                yield Completion(request, sample, FinishReason.STOP, ids, text)

    def _spend(self, should_stop: Callable[[], bool]) -> bool:
        """A row's time; False if the job was stopped meanwhile."""
        end = time.monotonic() + self._row_s
        while (left := end - time.monotonic()) > 0:
            if should_stop():
                return False
            time.sleep(min(left, _TICK_S))
        self.stats.busy_seconds += self._row_s
        return not should_stop()


def prepare(config: JobConfig, worker: str, started: float) -> Any:
    """What pipeline.prepare makes, of a source and a column."""
    from pipeline.cluster.join import join
    from pipeline.input.source import open_source
    from pipeline.output.fingerprint import fingerprint
    from pipeline.output.plan import JobPlan

    source = open_source(config.source)
    index = source.scan()
    plan = JobPlan(config.source, config.output, config.seed, config.sampling.n, fingerprint(config, {}))
    place = join(config, worker, started, plan, index)
    return StubJob(config, started, source, index.schema.names, place)


@dataclass
class StubJob:
    config: JobConfig
    started: float
    source: Any
    columns: list[str]
    place: Any

    def __post_init__(self) -> None:
        self.facts: dict[str, object] = {"model": "none"}
        self.sampling: list[Any] = []
        self.first_prompt = None
        self.directory, self.member = self.place.directory, self.place.member
        self.claims, self.limit = self.place.claims, self.place.limit
        self.num_results = self.directory.num_results

    def requests(self, work: Iterable[Any]) -> Iterator[Request]:
        from pipeline.input.rows import RowReader
        from pipeline.prompts.prompts import PromptRow

        reader = RowReader(self.source, self.directory.order, self.columns)
        params = SamplingParams(n=self.config.sampling.n)
        for claim in work:
            for wanted in claim.ranges():
                for row in reader.rows(wanted):
                    prompt = str(row.value(self.config.prompt.column))
                    ids, payload = np.arange(len(prompt), dtype=np.int32), PromptRow(row, 0)
                    yield Request(row.key, ids, params, claim.samples(row), prompt, payload)

    def load_engine(self, start_up: object) -> StubEngine:
        with open(os.environ["STUB_LOADS"], "a") as loads:
            task = os.environ.get("SLURM_ARRAY_TASK_ID", "?")
            loads.write(f"{task} {os.environ.get('SLURM_RESTART_COUNT', 0)}\n")
        return StubEngine(float(os.environ["STUB_ROW_S"]))

    def writer(self) -> Any:
        record = self.member.record
        return self.directory.writer(
            self.config.output,
            self.claims,
            record.incarnation,
            record.worker,
            self.started,
            record.gpu_hour_usd,
        )


def take_the_place_of_prepare() -> None:
    module = types.ModuleType("pipeline.prepare")
    module.prepare = prepare  # type: ignore[attr-defined]
    sys.modules["pipeline.prepare"] = module


def main() -> None:
    take_the_place_of_prepare()
    assert sys.argv[1] == "-m"
    sys.argv[:] = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
