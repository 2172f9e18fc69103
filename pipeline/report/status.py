"""How far a job is, how fast, and what it costs, over all its workers.

Knows: rates, money, words for people. Refuses to know: files. Values in, text out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The speed "now" is that of the last minutes before the last commit.
_WINDOW_S = 300.0
# A worker without a commit for so long is not counted as running.
_STALE_S = 600.0


@dataclass(frozen=True)
class Count:
    """What a part holds: results that count, those of them in error or skipped, tokens."""

    results: int = 0
    errors: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.results + other.results,
            self.errors + other.errors,
            self.skipped + other.skipped,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True)
class PartProgress:
    """What is known of one part. Times in seconds since 1970.

    points: time and count after each of its last commits, ascending. whole: the first point is the part's
    first commit. closed: when the part ended, None while it may grow.
    """

    worker: str
    started: float
    gpu_hour_usd: float
    points: tuple[tuple[float, Count], ...]
    whole: bool
    closed: float | None

    @property
    def count(self) -> Count:
        return self.points[-1][1] if self.points else Count()

    @property
    def last_time(self) -> float:
        times = [time for time, _ in self.points[-1:]] + ([self.closed] if self.closed else [])
        # clocks of a moved job may run backwards; time spent does not
        return max([self.started, *times])


@dataclass(frozen=True)
class JobStatus:
    """The state of a job. Rates are per second, money in US dollars.

    num_done counts results (rows times samples) of num_results. worker_hours: time of all workers from
    their start to their last commit. rows_per_s, tokens_per_s: of completion tokens, over the last
    minutes; None before anything was committed over a measurable time. idle_s: since the last commit.
    """

    num_results: int
    num_done: int
    num_errors: int
    num_skipped: int
    prompt_tokens: int
    completion_tokens: int
    num_parts: int
    num_workers: int
    num_running: int
    worker_hours: float
    cost_usd: float
    rows_per_s: float | None
    tokens_per_s: float | None
    mean_tokens_per_s: float | None
    idle_s: float | None

    @property
    def complete(self) -> bool:
        return self.num_done >= self.num_results

    @property
    def usd_per_million_tokens(self) -> float | None:
        return self.cost_usd / self.completion_tokens * 1e6 if self.completion_tokens else None

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present speed; None if nothing runs or nothing is known."""
        if self.complete:
            return 0.0
        if not self.rows_per_s or not self.num_running:
            return None
        return (self.num_results - self.num_done) / self.rows_per_s


def measure(parts: Sequence[PartProgress], num_results: int, now: float) -> JobStatus:
    """What the parts of a job add up to at the time `now`."""
    total = sum((part.count for part in parts), Count())
    seconds = sum(part.last_time - part.started for part in parts)
    last = max((time for part in parts for time, _ in part.points), default=None)
    results, tokens, window = (0, 0, 0.0) if last is None else _recent(parts, last)
    running = {part.worker for part in parts if part.closed is None and now - part.last_time < _STALE_S}
    return JobStatus(
        num_results=num_results,
        num_done=total.results,
        num_errors=total.errors,
        num_skipped=total.skipped,
        prompt_tokens=total.prompt_tokens,
        completion_tokens=total.completion_tokens,
        num_parts=len(parts),
        num_workers=len({part.worker for part in parts}),
        num_running=len(running),
        worker_hours=seconds / 3600,
        cost_usd=sum((part.last_time - part.started) / 3600 * part.gpu_hour_usd for part in parts),
        rows_per_s=results / window if window > 0 else None,
        tokens_per_s=tokens / window if window > 0 else None,
        mean_tokens_per_s=total.completion_tokens / seconds if seconds > 0 else None,
        idle_s=None if last is None else max(now - last, 0.0),
    )


def _recent(parts: Sequence[PartProgress], last: float) -> tuple[int, int, float]:
    """Results and completion tokens of the window before `last`, and its length in seconds."""
    results = tokens = 0
    begin = last
    for part in parts:
        inside = [point for point in part.points if point[0] > last - _WINDOW_S]
        if not inside:
            continue
        before = [point for point in part.points if point[0] <= last - _WINDOW_S]
        if before or not part.whole:
            # from the last commit before the window, or from the first that is known
            first_time, first = before[-1] if before else inside[0]
        else:
            first_time, first = part.started, Count()
        results += part.count.results - first.results
        tokens += part.count.completion_tokens - first.completion_tokens
        begin = min(begin, first_time)
    return results, tokens, last - begin


def render(state: JobStatus) -> str:
    """A few lines for people."""
    share = state.num_done / state.num_results if state.num_results else 1.0
    lines = [
        f"results   {state.num_done:,} of {state.num_results:,} ({share:.1%}), "
        f"{state.num_errors:,} errors, {state.num_skipped:,} skipped",
        f"tokens    {state.prompt_tokens:,} in, {state.completion_tokens:,} out",
        f"speed     {_number(state.tokens_per_s)} tokens/s, {_number(state.rows_per_s)} results/s "
        f"(mean of all worker time {_number(state.mean_tokens_per_s)} tokens/s a worker)",
        f"cost      ${state.cost_usd:,.2f} for {state.worker_hours:.2f} worker hours, "
        f"${_number(state.usd_per_million_tokens)} per million tokens out",
        f"workers   {state.num_running} running of {state.num_workers} seen, {state.num_parts} parts",
    ]
    if state.complete:
        lines.append("complete")
    elif state.num_running:
        lines.append(f"left      {_duration(state.eta_s)}, last commit {_duration(state.idle_s)} ago")
    else:
        lines.append("stopped   start the same command again to go on")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.2f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
