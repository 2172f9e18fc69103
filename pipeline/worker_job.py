"""What a worker needs of a job and of an engine: two interfaces, so that others can be brought without torch.

`prepare.py` has the job with a model, `engine/` the engines; tests and tools bring smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from pipeline.cluster.claims import Claim, Claims
from pipeline.cluster.time_limit import TimeLimit
from pipeline.cluster.workers import Member
from pipeline.config import JobConfig
from pipeline.output.writer import OutputWriter
from pipeline.report.outcome import RunningStats
from pipeline.report.start_up import StartUp
from pipeline.request import Completion, Request
from pipeline.timeline import Timeline


class JobEngine(Protocol):
    """What generates: `pipeline.engine.Engine`, or anything with its `generate` and `stats`."""

    @property
    def stats(self) -> RunningStats: ...

    def generate(
        self,
        requests: Iterable[Request],
        should_stop: Callable[[], bool],
        wanted: Callable[[Request, int], bool],
    ) -> Iterator[Completion]: ...


@runtime_checkable
class TimedEngine(Protocol):
    """An engine that tells where its time went, as ours does and transformers' does not."""

    @property
    def timeline(self) -> Timeline | None: ...
    @property
    def loaded(self) -> Any: ...
    @property
    def stats(self) -> Any: ...


class WorkerJob(Protocol):
    """A job as one worker sees it: `prepare.PreparedJob`, or a smaller one without a model.

    requests: of each claim in turn, claimed no sooner than it is needed.
    """

    @property
    def config(self) -> JobConfig: ...
    @property
    def member(self) -> Member: ...
    @property
    def claims(self) -> Claims: ...
    @property
    def limit(self) -> TimeLimit: ...
    @property
    def num_results(self) -> int: ...
    def requests(self, work: Iterable[Claim]) -> Iterator[Request]: ...
    def load_engine(self, start_up: StartUp) -> JobEngine: ...
    def writer(self) -> OutputWriter: ...
