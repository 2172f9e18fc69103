"""A recorded window of steps as a file in the Chrome trace event format, which Perfetto opens.

Knows the format; refuses to know who recorded. Times are written in microseconds from the window's begin.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.timeline import DEVICE_ROWS, DeviceSpan, HostSpan, Timeline

HOST_ROW = "host"
SLOT_NAMES = ("A", "B")
_ROWS = (HOST_ROW, *DEVICE_ROWS)
_PROCESS = 1


def write_trace(path: Path, timeline: Timeline) -> None:
    """Write the window as JSON; folders on the way are made. OSError if it cannot be written."""
    begins = [span.begin for span in timeline.host] + [span.begin for span in timeline.device]
    begin = min(begins, default=0.0)
    events = [_named("process_name", 0, name=f"tokenmill, {timeline.mode}")]
    there = {HOST_ROW} | {span.row for span in timeline.device}
    for number, row in enumerate(_ROWS):
        if row in there:
            events.append(_named("thread_name", number, name=row))
            events.append(_named("thread_sort_index", number, sort_index=number))
    for host in timeline.host:
        events.append(_span(HOST_ROW, host.phase, host, begin, {"step": host.step}))
    for device in timeline.device:
        slot = SLOT_NAMES[device.slot]
        name = f"step {device.step} (slot {slot})"
        events.append(_span(device.row, name, device, begin, {"step": device.step, "slot": slot}))
    trace = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "mode": timeline.mode,
            "on_gpu": timeline.on_gpu,
            "busy_share": timeline.busy_share,
            "step_seconds": timeline.step_seconds,
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace), encoding="utf-8")


def read_trace(path: Path) -> Timeline:
    """What `write_trace` wrote. ValueError for a file that is none of its own."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        about = trace["otherData"]
        host, device = [], []
        for event in trace["traceEvents"]:
            if event["ph"] != "X":
                continue
            args, begin, end = event["args"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            row = _ROWS[event["tid"]]
            if row == HOST_ROW:
                host.append(HostSpan(event["name"], args["step"], begin, end))
            else:
                slot = SLOT_NAMES.index(args["slot"])
                device.append(DeviceSpan(row, args["step"], slot, begin, end))
        return Timeline(about["mode"], about["on_gpu"], host, device)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} is no timeline of tokenmill: use a .json file from a job with engine.timeline=true"
        ) from error


def _named(kind: str, row: int, **value: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": row, "args": value}


def _span(
    row: str, name: str, span: HostSpan | DeviceSpan, origin: float, args: dict[str, Any]
) -> dict[str, Any]:
    # Both ends are rounded alike, so that neighbours stay neighbours.
    begin, end = (round((time - origin) * 1e6, 3) for time in (span.begin, span.end))
    return {
        "ph": "X",
        "name": name,
        "pid": _PROCESS,
        "tid": _ROWS.index(row),
        "ts": begin,
        "dur": round(end - begin, 3),
        "args": args,
    }
