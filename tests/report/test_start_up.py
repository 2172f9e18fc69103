from __future__ import annotations

import time

import pytest

from pipeline.report.start_up import StartUp


def test_each_stage_takes_the_time_since_the_one_before(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    start_up = StartUp()
    for stage, seconds in (("imports", 6.04), ("model", 3.26)):
        now += seconds
        start_up.finished(stage)
    now += 50.0
    assert start_up.text() == "9.3 s (imports 6.0, model 3.3)"
