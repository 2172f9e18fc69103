"""What one process's run of a job came to: counted while it goes, summed up at the end.

Knows completions as they pass; refuses to know the engine and the files. The numbers are this
process's; a job's own come from its journals (`status`).
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import Protocol

from pipeline.config import JobConfig
from pipeline.report.progress import ProgressStats
from pipeline.report.start_up import StartUp
from pipeline.report.summary import RunSummary, Showcase, StepTimes
from pipeline.request import Completion

# "Try again later" in sysexits.h: the job is sound, it is just not complete.
_EXIT_INCOMPLETE = 75


class RunningStats(Protocol):
    """What the engine tells about itself."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_use(self) -> float: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def busy_seconds(self) -> float: ...


class Outcome:
    """rows_to_do: results that were missing at the start. total_rows: those of the whole job.

    start_up, steps, timeline: what there is to say about them once that is known.
    """

    def __init__(self, config: JobConfig, rows_to_do: int, total_rows: int, started: float) -> None:
        self.start_up: StartUp | None = None
        self.steps: StepTimes | None = None
        self.timeline: str | None = None
        self.started = started
        self.rows_before = total_rows - rows_to_do
        self.stopped_by: signal.Signals | str | None = None
        # how many other workers have the rest
        self.num_others = 0
        # whether it was the time limit that left something undone
        self.out_of_time = False
        self._is_complete = False
        self.showcase = Showcase(config.report.show_completions)
        self._config = config
        self._rows_to_do = rows_to_do
        self._by_reason: Counter[str] = Counter()
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def add(self, completion: Completion) -> None:
        request = completion.request
        self._by_reason[completion.finish_reason.value] += 1
        self._prompt_tokens += len(request.prompt_ids)
        self._completion_tokens += len(completion.token_ids)
        if completion.text is not None:
            column, row = self._config.report.expected_column, request.payload.row
            has_answer = column is not None and column in row.batch.schema.names
            self.showcase.add(request.prompt, completion.text, row.value(column) if has_answer else None)

    def end(
        self,
        stopped_by: signal.Signals | str | None,
        num_others: int,
        is_complete: bool = False,
        out_of_time: bool = False,
    ) -> None:
        """stopped_by: what ended the work before its time. num_others: workers that make what is left.
        is_complete: nothing is, whoever made it. out_of_time: it was the time limit that ended the work."""
        self.stopped_by = stopped_by
        self._is_complete = is_complete
        self.num_others = num_others
        self.out_of_time = out_of_time

    def work(self, engine: RunningStats) -> tuple[int, int, float]:
        """Rows, completion tokens, and seconds that the engine was busy, so far."""
        return self._by_reason.total(), self._completion_tokens, engine.busy_seconds

    def progress(self, engine: RunningStats) -> ProgressStats:
        return ProgressStats(
            completed_rows=self._by_reason.total(),
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            kv_use=engine.kv_use,
        )

    def summary(self) -> RunSummary:
        return RunSummary(
            output_dir=self._config.output.dir,
            rows_by_reason=dict(self._by_reason),
            rows_before=self.rows_before,
            rows_left=0 if self._is_complete else max(self._rows_to_do - self._by_reason.total(), 0),
            num_others=self.num_others,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            seconds=time.time() - self.started,
            stopped_by=self._reason(),
            start_up=self.start_up.text() if self.start_up else None,
            steps=self.steps,
            timeline=self.timeline,
        )

    def _reason(self) -> str | None:
        if isinstance(self.stopped_by, signal.Signals):
            return f"by {self.stopped_by.name}"
        return self.stopped_by

    @property
    def exit_code(self) -> int:
        """0 when the job is complete or others make the rest, as the shell counts a signal, or 75 for the
        same command again."""
        if isinstance(self.stopped_by, signal.Signals):
            return 128 + self.stopped_by
        return _EXIT_INCOMPLETE if self.summary().rows_left and not self.num_others else 0
