"""Shows a running job: a bar on a terminal, a line now and then in a log.

Knows: numbers to show and the stream to show them on. Refuses to know: the engine, rows, files.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

from tqdm import tqdm

from pipeline.config import CostConfig, ReportConfig
from pipeline.report.cost import dollars, dollars_per_million, money, projected


@dataclass(frozen=True)
class ProgressStats:
    """Where a job stands. Rows and tokens count this process's work; kv_use is a share, 0 to 1."""

    completed_rows: int
    prompt_tokens: int
    completion_tokens: int
    num_running: int
    num_waiting: int
    kv_use: float


class ProgressDisplay:
    """Shows each `update`, at most every report.interval_s seconds where there is no terminal.

    total_rows: of the whole job. rows_before: those done before this process started.
    """

    def __init__(
        self,
        total_rows: int,
        config: ReportConfig,
        cost: CostConfig,
        rows_before: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_rows = total_rows
        self._rows_before = rows_before
        self._interval_s = config.interval_s
        self._gpu_hour_usd = cost.gpu_hour_usd
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._started = self._shown_at = clock()
        self._shown = ProgressStats(0, 0, 0, 0, 0, 0.0)
        self._latest: ProgressStats | None = None
        # A log file would keep each redrawing of the bar, carriage returns and all.
        self._bar: Any = self._open_bar() if self._stream.isatty() else None

    def update(self, stats: ProgressStats) -> None:
        self._latest = stats
        if self._bar is not None:
            self._bar.update(self._rows_before + stats.completed_rows - self._bar.n)
        if self._clock() - self._shown_at >= (1.0 if self._bar is not None else self._interval_s):
            self._show(stats)

    def close(self) -> None:
        """Shows the last state, however short ago the last line was. Closing again does nothing."""
        if self._latest is not None and self._latest != self._shown:
            self._show(self._latest)
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._latest = None

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open_bar(self) -> Any:
        return tqdm(
            total=self._total_rows,
            initial=self._rows_before,
            unit="row",
            file=self._stream,
            dynamic_ncols=True,
        )

    def _show(self, stats: ProgressStats) -> None:
        now = self._clock()
        seconds = max(now - self._shown_at, 1e-9)
        tokens_per_s = (stats.completion_tokens - self._shown.completion_tokens) / seconds
        text = self._describe(stats, tokens_per_s, now - self._started)
        self._shown, self._shown_at = stats, now
        if self._bar is not None:
            self._bar.set_postfix_str(text)
            return
        done = self._rows_before + stats.completed_rows
        eta = self._remaining(stats, now - self._started)
        print(f"{rows_text(done, self._total_rows)}, {text}{eta}", file=self._stream, flush=True)

    def _describe(self, stats: ProgressStats, tokens_per_s: float, elapsed_s: float) -> str:
        parts = [
            f"{tokens_per_s:,.0f} tokens/s",
            f"{stats.num_running} running",
            f"{stats.num_waiting} waiting",
            f"KV {stats.kv_use:.0%}",
        ]
        spent = dollars(elapsed_s, self._gpu_hour_usd)
        per_million = dollars_per_million(spent, stats.completion_tokens)
        if self._gpu_hour_usd > 0 and per_million is not None:
            parts.append(f"{money(per_million)}/M tokens")
        return ", ".join(parts)

    def _remaining(self, stats: ProgressStats, elapsed_s: float) -> str:
        to_do = self._total_rows - self._rows_before
        whole = projected(elapsed_s, stats.completed_rows, to_do)
        if whole is None or stats.completed_rows >= to_do:
            return ""
        return f", {duration_text(whole - elapsed_s)} left"


def rows_text(done: int, total: int) -> str:
    share = f" ({done / total:.0%})" if total else ""
    return f"{done:,}/{total:,} rows{share}"


def duration_text(seconds: float) -> str:
    """As people read it: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60:02d} min"
