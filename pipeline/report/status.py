"""How far a job is, how fast, and what it costs, over all its workers.

Knows: rates, money, hours, who is alive. Refuses to know: files, and how it is told (`status_text.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

# The speed "now" is that of the last minutes before the last commit.
WINDOW_S = 300.0


@dataclass(frozen=True)
class Count:
    """What a part holds: results, those of them in error or skipped, tokens."""

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

    points: time and count after some of its last commits, ascending, the last one among them. whole: the
    first point is the part's first commit. void: what of it does not count, other workers made it.
    """

    incarnation: str
    started: float
    points: tuple[tuple[float, Count], ...]
    whole: bool
    void: Count = Count()

    @property
    def count(self) -> Count:
        return self.points[-1][1] if self.points else Count()

    @property
    def last_time(self) -> float:
        # clocks of a moved job may run backwards; time spent does not
        return max([self.started, *(time for time, _ in self.points[-1:])])


@dataclass(frozen=True)
class WorkerProgress:
    """One process's life as its record tells. Times in seconds since 1970.

    worker: the name that it keeps over restarts. loaded: when its model was there; None if that never was.
    busy_s: time in which its engine computed. ended: it said that it left. is_gone: it did not, and its
    process is known to be over.
    """

    incarnation: str
    worker: str
    started: float
    loaded: float | None
    beat: float
    busy_s: float
    gpu_hour_usd: float
    ended: bool
    is_gone: bool = False


class State(str, Enum):
    running = "running"
    # no sign of life for as long as its lease lasts, or known to be over without a word
    stale = "stale"
    ended = "ended"


@dataclass(frozen=True)
class WorkerState:
    """A worker in the last of its lives. beat_age_s: since its last sign of life."""

    name: str
    state: State
    beat_age_s: float


@dataclass(frozen=True)
class GpuHours:
    """Hours of all workers: until the model was loaded, of computing what counts, of waiting, of computing
    what other workers made as well."""

    loading: float = 0.0
    useful: float = 0.0
    idle: float = 0.0
    redone: float = 0.0

    @property
    def total(self) -> float:
        return self.loading + self.useful + self.idle + self.redone

    def __add__(self, other: GpuHours) -> GpuHours:
        return GpuHours(
            self.loading + other.loading,
            self.useful + other.useful,
            self.idle + other.idle,
            self.redone + other.redone,
        )


@dataclass(frozen=True)
class JobStatus:
    """The state of a job. Rates are per second, money in US dollars.

    num_done counts results (rows times samples) of num_results; num_skipped and tokens are of those that
    count, redone_tokens of completions that were made in vain. rows_per_s, tokens_per_s: of completion
    tokens, over the last minutes; None before anything was committed over a measurable time. idle_s: since
    the last commit. num_restarts: lives of workers beyond their first.
    """

    num_results: int
    num_done: int
    num_errors: int
    num_skipped: int
    prompt_tokens: int
    completion_tokens: int
    redone_tokens: int
    num_parts: int
    num_restarts: int
    hours: GpuHours
    cost_usd: float
    rows_per_s: float | None
    tokens_per_s: float | None
    idle_s: float | None
    workers: tuple[WorkerState, ...]

    @property
    def complete(self) -> bool:
        return self.num_done >= self.num_results

    def num_workers(self, state: State) -> int:
        return sum(worker.state is state for worker in self.workers)

    @property
    def mean_tokens_per_s(self) -> float | None:
        """Of one worker, over all of its time."""
        seconds = self.hours.total * 3600
        return self.completion_tokens / seconds if seconds > 0 else None

    @property
    def usd_per_million_tokens(self) -> float | None:
        return self.cost_usd / self.completion_tokens * 1e6 if self.completion_tokens else None

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present speed; None if nothing runs or nothing is known."""
        if self.complete:
            return 0.0
        if not self.rows_per_s or not self.num_workers(State.running):
            return None
        return (self.num_results - self.num_done) / self.rows_per_s


def measure(
    parts: Sequence[PartProgress],
    workers: Sequence[WorkerProgress],
    num_results: int,
    now: float,
    lease_s: float,
) -> JobStatus:
    """What the parts and workers of a job add up to at the time `now`.

    lease_s: a worker that is silent for so long is stale.
    """
    total = sum((part.count for part in parts), Count())
    void = sum((part.void for part in parts), Count())
    last = max((time for part in parts for time, _ in part.points), default=None)
    results, tokens, window = (0, 0, 0.0) if last is None else _recent(parts, last)
    by_incarnation: dict[str, list[PartProgress]] = {}
    for part in parts:
        by_incarnation.setdefault(part.incarnation, []).append(part)
    hours = [_hours(worker, by_incarnation.get(worker.incarnation, [])) for worker in workers]
    states = _states(workers, now, lease_s)
    return JobStatus(
        num_results=num_results,
        num_done=total.results - void.results,
        num_errors=total.errors - void.errors,
        num_skipped=total.skipped - void.skipped,
        prompt_tokens=total.prompt_tokens - void.prompt_tokens,
        completion_tokens=total.completion_tokens - void.completion_tokens,
        redone_tokens=void.completion_tokens,
        num_parts=len(parts),
        num_restarts=len(workers) - len(states),
        hours=sum(hours, GpuHours()),
        cost_usd=sum(h.total * worker.gpu_hour_usd for h, worker in zip(hours, workers, strict=True)),
        rows_per_s=results / window if window > 0 else None,
        tokens_per_s=tokens / window if window > 0 else None,
        idle_s=None if last is None else max(now - last, 0.0),
        workers=states,
    )


def _hours(worker: WorkerProgress, parts: Sequence[PartProgress]) -> GpuHours:
    """parts: those of this life."""
    end = max([worker.beat, *(part.last_time for part in parts)])
    total = max(end - worker.started, 0.0)
    if worker.loaded is None:
        # whoever left without a model had found nothing to do
        return GpuHours(idle=total / 3600) if worker.ended else GpuHours(loading=total / 3600)
    loading = min(max(worker.loaded - worker.started, 0.0), total)
    busy = min(worker.busy_s, total - loading)
    made = sum(part.count.completion_tokens for part in parts)
    void = sum(part.void.completion_tokens for part in parts)
    redone = busy * void / made if made else 0.0
    return GpuHours(loading / 3600, (busy - redone) / 3600, (total - loading - busy) / 3600, redone / 3600)


def _states(workers: Sequence[WorkerProgress], now: float, lease_s: float) -> tuple[WorkerState, ...]:
    lives: dict[str, WorkerProgress] = {}
    for life in sorted(workers, key=lambda worker: worker.started):
        lives[life.worker] = life
    states = []
    for name, life in sorted(lives.items()):
        age = max(now - life.beat, 0.0)
        silent = State.stale if life.is_gone or age > lease_s else State.running
        states.append(WorkerState(name, State.ended if life.ended else silent, age))
    return tuple(states)


def _recent(parts: Sequence[PartProgress], last: float) -> tuple[int, int, float]:
    """Results and completion tokens of the window before `last`, and its length in seconds."""
    results = tokens = 0
    begin = last
    for part in parts:
        inside = [point for point in part.points if point[0] > last - WINDOW_S]
        if not inside:
            continue
        before = [point for point in part.points if point[0] <= last - WINDOW_S]
        if before or not part.whole:
            # from the last commit before the window, or from the first that is known
            first_time, first = before[-1] if before else inside[0]
        else:
            first_time, first = part.started, Count()
        results += part.count.results - first.results
        tokens += part.count.completion_tokens - first.completion_tokens
        begin = min(begin, first_time)
    return results, tokens, last - begin
