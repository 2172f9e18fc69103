"""What Perfetto gets to read, and that it is read back as it was."""

from __future__ import annotations

import json

import pytest

from pipeline.report.trace import read_trace, write_trace
from pipeline.timeline import DeviceSpan, HostSpan, Timeline

# On a clock that has run for days, as time.perf_counter() may have.
_DAYS = 1e6
RECORDED = Timeline(
    "async",
    True,
    [
        HostSpan("prepare", 42, _DAYS + 0.0005, _DAYS + 0.0007),
        HostSpan("launch", 42, _DAYS + 0.0007, _DAYS + 0.0008),
        HostSpan("wait", 41, _DAYS + 0.0008, _DAYS + 0.0030),
    ],
    [
        DeviceSpan("compute", 41, 1, _DAYS, _DAYS + 0.0029),
        DeviceSpan("H2D", 42, 0, _DAYS + 0.0008, _DAYS + 0.0009),
        DeviceSpan("compute", 42, 0, _DAYS + 0.0029, _DAYS + 0.0060),
        DeviceSpan("D2H", 41, 1, _DAYS + 0.0029, _DAYS + 0.00295),
    ],
)


def test_rows_have_their_names_and_events_their_steps(tmp_path):
    write_trace(tmp_path / "made" / "w0.json", RECORDED)
    trace = json.loads((tmp_path / "made" / "w0.json").read_text())
    rows = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name" and event["ph"] == "M"
    }
    assert [rows[tid] for tid in sorted(rows)] == ["host", "H2D", "compute", "D2H"]
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len({event["pid"] for event in trace["traceEvents"]}) == 1
    found = {(rows[event["tid"]], event["name"]): event for event in events}
    assert found.keys() == {
        ("host", "prepare"),
        ("host", "launch"),
        ("host", "wait"),
        ("H2D", "step 42 (slot A)"),
        ("compute", "step 41 (slot B)"),
        ("compute", "step 42 (slot A)"),
        ("D2H", "step 41 (slot B)"),
    }
    step = found["compute", "step 42 (slot A)"]
    assert (step["ts"], step["dur"]) == pytest.approx((2900, 3100), abs=0.01)
    assert step["args"] == {"step": 42, "slot": "A"}
    assert found["host", "wait"]["args"] == {"step": 41}


def test_it_is_read_back_as_it_was(tmp_path):
    path = tmp_path / "w0.json"
    write_trace(path, RECORDED)
    again = read_trace(path)
    assert (again.mode, again.on_gpu) == ("async", True)
    assert [(s.phase, s.step) for s in again.host] == [(s.phase, s.step) for s in RECORDED.host]
    for span, original in zip(again.device, RECORDED.device, strict=True):
        assert (span.row, span.step, span.slot) == (original.row, original.step, original.slot)
        assert span.begin == pytest.approx(original.begin - _DAYS, abs=1e-8)
        assert span.end == pytest.approx(original.end - _DAYS, abs=1e-8)
    assert again.busy_share == pytest.approx(RECORDED.busy_share)
    # Neighbours stay neighbours: an event that overlaps the next is drawn inside it.
    for before, after in zip(again.host, again.host[1:], strict=False):
        assert before.end == pytest.approx(after.begin, abs=1e-12)


def test_rows_without_events_are_not_there(tmp_path):
    path = tmp_path / "w0.json"
    computes = [span for span in RECORDED.device if span.row == "compute"]
    write_trace(path, Timeline("sync", False, RECORDED.host, computes))
    names = [e["args"].get("name") for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "M"]
    assert "compute" in names and "H2D" not in names and "D2H" not in names


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X"}]}'])
def test_another_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no timeline .* engine\.timeline=true"):
        read_trace(path)
