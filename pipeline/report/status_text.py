"""The state of a job in words: some lines for whoever asks, one line for whoever waits.

Values in, text out.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.report.status import JobStatus, State

# So many workers of a kind are named, those that were heard of last.
_SHOWN_NAMES = 6


def render(state: JobStatus) -> str:
    """A few lines for people."""
    hours = state.hours
    share = state.num_done / state.num_results if state.num_results else 1.0
    vain = f", {state.redone_tokens:,} more made in vain" if state.redone_tokens else ""
    lines = [
        f"results   {state.num_done:,} of {state.num_results:,} ({share:.1%}), "
        f"{state.num_errors:,} errors, {state.num_skipped:,} skipped",
        f"tokens    {state.prompt_tokens:,} in, {state.completion_tokens:,} out{vain}",
        f"speed     {_number(state.tokens_per_s)} tokens/s, {_number(state.rows_per_s)} results/s "
        f"(mean of all worker time {_number(state.mean_tokens_per_s)} tokens/s a worker)",
        f"cost      ${state.cost_usd:,.2f} for {hours.total:.2f} GPU-hours, "
        f"${_number(state.usd_per_million_tokens)} per million tokens out",
        f"GPU time  {_hours(hours.loading)} loading, {_hours(hours.useful)} useful, "
        f"{_hours(hours.idle)} idle, {_hours(hours.redone)} redone",
        *_worker_lines(state),
    ]
    running = state.num_workers(State.running)
    if state.complete:
        lines.append("complete")
    elif running:
        lines.append(f"left      {_duration(state.eta_s)}, last commit {_duration(state.idle_s)} ago")
    else:
        lines.append("stopped   start the same command again to go on")
    return "\n".join(lines)


def _worker_lines(state: JobStatus) -> Iterator[str]:
    counts = ", ".join(f"{state.num_workers(one)} {one.value}" for one in State)
    yield f"workers   {counts}, {state.num_restarts} restarts, {state.num_parts} parts"
    for one in State:
        names = [
            f"{worker.name} ({_duration(worker.beat_age_s)} ago)"
            for worker in sorted(state.workers, key=lambda worker: worker.beat_age_s)
            if worker.state is one
        ]
        if names:
            more = f" and {len(names) - _SHOWN_NAMES:,} more" if len(names) > _SHOWN_NAMES else ""
            yield f"  {one.value:<8}{', '.join(names[:_SHOWN_NAMES])}{more}"


def progress_line(state: JobStatus) -> str:
    """All workers in one line, for a terminal or a log."""
    share = f" ({state.num_done / state.num_results:.0%})" if state.num_results else ""
    running, stale = state.num_workers(State.running), state.num_workers(State.stale)
    parts = [
        f"{state.num_done:,}/{state.num_results:,} rows{share}",
        f"{0.0 if state.tokens_per_s is None else state.tokens_per_s:,.0f} tokens/s",
        f"{running} worker{'' if running == 1 else 's'}" + (f", {stale} stale" if stale else ""),
    ]
    if state.cost_usd:
        parts.append(f"${state.cost_usd:,.2f}")
    if state.eta_s:
        parts.append(f"{_duration(state.eta_s)} left")
    return ", ".join(parts)


def _hours(hours: float) -> str:
    return _duration(hours * 3600)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.2f}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
