"""The picture of a recorded window: `python -m pipeline.report.timeline TRACE.json OUT.png`.

The host's row above, the device's below, as time goes from left to right: where a row is empty, somebody
waits. Knows matplotlib, which is optional; refuses to know who recorded.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.report.trace import HOST_ROW, SLOT_NAMES, read_trace, write_trace
from pipeline.timeline import DEVICE_ROWS, Timeline

# So many of the window's steps can be told apart in one picture.
_SHOWN_STEPS = 6
_SIZE_INCHES = (13.0, 3.6)
_DPI = 150
_BAR = 0.72
# Text needs about this share of the picture's width for each of its characters.
_WIDTH_OF_CHARACTER = 0.0075

# Told apart by the colour-blind too; waiting is pale, for nothing happens there.
_PHASE_COLOURS = {
    "intake": "#56b4e9",
    "schedule": "#e69f00",
    "prepare": "#d55e00",
    "launch": "#cc79a7",
    "wait": "#e3e3e3",
    "update": "#0072b2",
    "complete": "#f0e442",
    "consumer": "#b0b0b0",
}
_SLOT_COLOURS = ("#4c78a8", "#9ecae9")


def write_timeline(folder: Path, worker: str, timeline: Timeline | None, after: int) -> str:
    """Write `<worker>.json` into the folder, and `<worker>.png` where matplotlib is. Returns what to say.

    after: the step at which the window was to begin, for when it was never reached.
    """
    if timeline is None or not timeline.compute:
        return f"none: the job had no step after its first {after}; lower engine.timeline_after"
    trace = folder / f"{worker}.json"
    write_trace(trace, timeline)
    if find_spec("matplotlib") is None:
        return (
            f"{trace} for ui.perfetto.dev; for a picture: pip install 'tokenmill[timeline]' && "
            f"python -m {_COMMAND} {trace} {trace.with_suffix('.png')}"
        )
    picture = trace.with_suffix(".png")
    draw(picture, timeline)
    return f"{picture}, and {trace.name} for ui.perfetto.dev"


def draw(path: Path, timeline: Timeline) -> None:
    """Draw the middle of the window as a PNG. ImportError where matplotlib is not installed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    begin, end = _shown(timeline)
    used = [row for row in DEVICE_ROWS if any(span.row == row for span in timeline.device)]
    for host in timeline.host:
        colour = _PHASE_COLOURS[host.phase]
        _bar(axes, 0, (host.begin - begin, host.end - begin), end - begin, colour, host.phase, host.step)
    for device in timeline.device:
        colour, name = _SLOT_COLOURS[device.slot], f"slot {SLOT_NAMES[device.slot]}, step"
        times = (device.begin - begin, device.end - begin)
        _bar(axes, 1 + used.index(device.row), times, end - begin, colour, name, device.step)
    rows = [HOST_ROW, *used]
    axes.set_yticks(range(len(rows)), [_label(row, timeline.on_gpu) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0.0, (end - begin) * 1e3)
    axes.set_xlabel("ms")
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(_title(timeline))
    _legend(figure, {span.phase for span in timeline.host})
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _legend(figure: Any, phases: set[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=name) for name, colour in _PHASE_COLOURS.items() if name in phases]
    patches += [Patch(color=c, label=f"slot {n}") for c, n in zip(_SLOT_COLOURS, SLOT_NAMES, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)


def _shown(timeline: Timeline) -> tuple[float, float]:
    """The stretch of time to draw: whole steps from the middle of the window."""
    steps = timeline.compute
    first = max(0, (len(steps) - _SHOWN_STEPS) // 2)
    shown = steps[first : first + _SHOWN_STEPS + 1]
    last = shown[-1].begin if len(shown) > _SHOWN_STEPS else shown[-1].end
    # The host's work for the first step belongs into the picture where the device waits for it.
    before = steps[first - 1].end if first else min(span.begin for span in timeline.host)
    return min(before, shown[0].begin), last


def _bar(
    axes: Any, row: int, times: tuple[float, float], shown: float, colour: str, name: str, step: int
) -> None:
    """times: begin and end in seconds; what lies outside of 0 to `shown` is cut off."""
    left, right = max(times[0], 0.0), min(times[1], shown)
    if right <= left:
        return
    axes.broken_barh(
        [(left * 1e3, (right - left) * 1e3)], (row - _BAR / 2, _BAR), facecolors=colour, linewidth=0
    )
    # The number alone, or nothing, rather than text across the neighbours.
    for text in (f"{name} {step}", str(step)):
        if (right - left) / shown > (len(text) + 1) * _WIDTH_OF_CHARACTER:
            axes.text((left + right) / 2 * 1e3, row, text, ha="center", va="center", fontsize=8)
            return


def _label(row: str, on_gpu: bool) -> str:
    if not on_gpu:
        return row
    return "CPU" if row == HOST_ROW else f"GPU: {row}"


def _title(timeline: Timeline) -> str:
    parts = [timeline.mode]
    if timeline.busy_share is not None and timeline.step_seconds is not None:
        busy = "GPU busy" if timeline.on_gpu else "in steps"
        parts += [f"{busy} {timeline.busy_share:.1%}", f"{timeline.step_seconds * 1e3:.2f} ms a step"]
    return f"{', '.join(parts)} ({len(timeline.compute)} steps recorded)"


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(f"usage: python -m {_COMMAND} TRACE.json OUT.png", file=sys.stderr)
        return 2
    try:
        draw(Path(arguments[1]), read_trace(Path(arguments[0])))
    except ImportError:
        print("tokenmill: pictures need matplotlib: pip install 'tokenmill[timeline]'", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"tokenmill: {error}", file=sys.stderr)
        return 1
    return 0


_COMMAND = "pipeline.report.timeline"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
