"""The text at a job's start and at its end. Plain values in, text out."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config import CostConfig
from pipeline.report.cost import dollars, dollars_per_million, money
from pipeline.report.progress import duration_text

_SHOWN_CHARS = 600
_SHOWN_MS = 0.01
# Phases in which the host waits, or somebody else is at work.
_NOT_THE_HOSTS = ("wait", "consumer")


@dataclass(frozen=True)
class ResolvedValue:
    """A setting as it applies, and where it came from: `sampling.temperature`, `generation_config`, ..."""

    key: str
    value: Any
    origin: str


def start_block(
    facts: Mapping[str, object], sampling: Sequence[ResolvedValue], first_prompt: str | None
) -> str:
    """What is about to run. facts: label -> value, in the order to show (model, input, output, ...).

    first_prompt: the first row's as the model will see it; None when there is no row left to do.
    """
    lines = _table([(label, str(value)) for label, value in facts.items()])
    lines.append("sampling")
    lines += _table([(v.key, f"{v.value}  ({v.origin})") for v in sampling], indent="  ")
    if first_prompt is not None:
        lines += ["first prompt", textwrap.indent(shortened(first_prompt), "  | ", lambda line: True)]
    return "\n".join(lines)


@dataclass(frozen=True)
class StepTimes:
    """What an engine's steps took. busy_seconds: on the device. phase_seconds: the host's, by phase."""

    on_gpu: bool
    num_steps: int
    busy_seconds: float
    phase_seconds: Mapping[str, float]


@dataclass(frozen=True)
class RunSummary:
    """How a run ended. Rows, tokens and seconds are this process's; rows_left those of the whole job, as far
    as this process knows.

    stopped_by: what ended it before its time, in words. num_others: workers that make what is left.
    start_up, timeline: in words, None if there was none. steps: None if there was none, or if the engine
    does not tell.
    """

    output_dir: str
    rows_by_reason: Mapping[str, int]
    rows_before: int
    rows_left: int
    prompt_tokens: int
    completion_tokens: int
    seconds: float
    stopped_by: str | None = None
    num_others: int = 0
    start_up: str | None = None
    steps: StepTimes | None = None
    timeline: str | None = None


def closing_summary(run: RunSummary, cost: CostConfig) -> str:
    """What was done, what it cost, where it is and how to go on."""
    spent = dollars(run.seconds, cost.gpu_hour_usd)
    per_million = dollars_per_million(spent, run.completion_tokens)
    rate = run.completion_tokens / run.seconds if run.seconds > 0 else 0.0
    entries = [
        ("rows", _rows(run)),
        ("tokens", f"{run.prompt_tokens:,} in, {run.completion_tokens:,} out"),
        ("time", f"{duration_text(run.seconds)}, {rate:,.0f} output tokens/s"),
    ]
    if run.start_up is not None:
        entries.append(("start-up", run.start_up))
    if run.steps is not None and run.steps.num_steps:
        entries += [("steps", _steps(run.steps)), ("host", _host(run.steps))]
    if cost.gpu_hour_usd > 0 and per_million is not None:
        price = f"{money(cost.gpu_hour_usd)} a GPU-hour"
        entries.append(("cost", f"{money(spent)}, {money(per_million)} per million output tokens ({price})"))
    entries.append(("output", run.output_dir))
    if run.timeline is not None:
        entries.append(("timeline", run.timeline))
    if run.stopped_by is not None:
        entries.append(("stopped", run.stopped_by))
    return "\n".join(_table(entries) + next_steps(run.output_dir, run.rows_left > 0, run.num_others > 0))


def _steps(steps: StepTimes) -> str:
    seconds = sum(steps.phase_seconds.values())
    share = f"{steps.busy_seconds / seconds:.1%}"
    busy = f"GPU busy {share}" if steps.on_gpu else f"{share} of generating"
    return f"{steps.num_steps:,}, {busy}, {1e3 * seconds / steps.num_steps:.2f} ms each"


def _host(steps: StepTimes) -> str:
    """The host's own work for a step by phase, then what is not its work."""
    each = {phase: 1e3 * seconds / steps.num_steps for phase, seconds in steps.phase_seconds.items()}
    work = {phase: ms for phase, ms in each.items() if phase not in _NOT_THE_HOSTS}
    phases = ", ".join(f"{phase} {ms:.2f}" for phase, ms in work.items() if ms >= _SHOWN_MS)
    rest = ", ".join(f"{phase} {each[phase]:.2f}" for phase in _NOT_THE_HOSTS if phase in each)
    return f"{sum(work.values()):.2f} ms a step ({phases}); {rest}"


def _rows(run: RunSummary) -> str:
    by_reason = ", ".join(f"{count:,} {reason}" for reason, count in run.rows_by_reason.items() if count)
    text = f"{sum(run.rows_by_reason.values()):,} now" + (f" ({by_reason})" if by_reason else "")
    if run.rows_before:
        text += f", {run.rows_before:,} before"
    if run.num_others:
        return text + f", the rest is with {run.num_others:,} other worker{'s' if run.num_others > 1 else ''}"
    return text + (f", {run.rows_left:,} to do" if run.rows_left else ", none to do")


def next_steps(folder: str, is_left: bool, with_others: bool = False) -> list[str]:
    """What to do now, a line each. is_left: something is to be made. with_others: by workers that do so."""
    steps = [("as it is", f'pipeline.open_parts("{folder}").to_table()')]
    if with_others:
        return ["next"] + _table([("how far", f"tokenmill status {folder}"), *steps], indent="  ")
    if is_left:
        return ["next"] + _table([("go on", "the same command again"), *steps], indent="  ")
    steps += [
        ("prove it", f"tokenmill verify {folder}"),
        ("one dataset", f"tokenmill finalize {folder}"),
        ("open that", f'datasets.load_from_disk("{folder.rstrip("/")}/dataset")'),
    ]
    return ["next"] + _table(steps, indent="  ")


class Showcase:
    """Keeps the first few completions to show, and counts right answers where one is known."""

    def __init__(self, num_shown: int) -> None:
        self._num_shown = num_shown
        self._shown: list[tuple[str, str, str | None]] = []
        self._num_checked = 0
        self._num_right = 0

    def add(self, prompt: str | None, completion: str | None, expected: object = None) -> None:
        """expected: the value of report.expected_column; None where there is no right answer."""
        answer = None if expected is None else str(expected).strip()
        if answer is not None:
            self._num_checked += 1
            self._num_right += (completion or "").strip() == answer
        if len(self._shown) < self._num_shown:
            self._shown.append((prompt or "", completion or "", answer))

    def text(self) -> str:
        """The completions and the score; empty when nothing was added."""
        lines = []
        for prompt, completion, answer in self._shown:
            right = answer is None or completion.strip() == answer
            remark = "" if right else f"   (expected: {shortened(answer or '')})"
            lines += [f"> {shortened(prompt)}", textwrap.indent(shortened(completion) + remark, "  "), ""]
        if self._num_checked:
            share = self._num_right / self._num_checked
            lines.append(
                f"{self._num_right:,} of {self._num_checked:,} checked answers are right ({share:.1%})"
            )
        return "\n".join(lines).rstrip()


def shortened(text: str, limit: int = _SHOWN_CHARS) -> str:
    """`text`, its middle left out when it is long: the two ends say most about a prompt."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … [{len(text) - 2 * half:,} characters] … {text[-half:]}"


def _table(entries: Sequence[tuple[str, str]], indent: str = "") -> list[str]:
    width = max((len(label) for label, _ in entries), default=0)
    return [f"{indent}{label:<{width}}  {value}" for label, value in entries]
