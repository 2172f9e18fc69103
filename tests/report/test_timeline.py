"""The picture, where matplotlib is, and what is said where it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.report.timeline import main, write_timeline
from pipeline.report.trace import read_trace, write_trace
from pipeline.timeline import DeviceSpan, HostSpan, Timeline

_BLUE, _PALE_BLUE, _RED = (0x4C, 0x78, 0xA8), (0x9E, 0xCA, 0xE9), (0xD5, 0x5E, 0x00)


def steps(num_steps: int = 20, on_gpu: bool = True) -> Timeline:
    """Steps of 5 ms with a gap of 1 ms, in which the host prepares."""
    host, device = [], []
    for step in range(num_steps):
        at = 100.0 + 0.006 * step
        host += [HostSpan("prepare", step, at, at + 0.001), HostSpan("wait", step, at + 0.001, at + 0.006)]
        device.append(DeviceSpan("compute", step, step % 2, at + 0.001, at + 0.006))
        if on_gpu:
            device.append(DeviceSpan("H2D", step, step % 2, at + 0.0009, at + 0.001))
    return Timeline("sync", on_gpu, host, device)


def colours(path: Path) -> set[tuple[int, ...]]:
    image = pytest.importorskip("matplotlib.image").imread(path)
    assert image.shape[0] > 300 and image.shape[1] > 1000
    pixels = (image[..., :3] * 255).round().astype(int).reshape(-1, 3)
    return set(map(tuple, pixels[::7].tolist()))


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.parametrize("num_steps", [1, 3, 20])
@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_picture_shows_both_slots_and_the_host(tmp_path, num_steps, on_gpu):
    pytest.importorskip("matplotlib")
    said = write_timeline(tmp_path / "timeline", "w0", steps(num_steps, on_gpu), after=5)
    assert said == f"{tmp_path}/timeline/w0.png, and w0.json for ui.perfetto.dev"
    drawn = colours(tmp_path / "timeline" / "w0.png")
    assert {_BLUE, _RED} <= drawn
    assert len(read_trace(tmp_path / "timeline" / "w0.json").compute) == num_steps


def test_a_picture_shows_the_middle_of_a_long_window(tmp_path):
    pytest.importorskip("matplotlib")
    # Slot A computes the first half of the steps only; the middle has both slots.
    window = steps(40)
    device = [DeviceSpan(s.row, s.step, int(s.step >= 20), s.begin, s.end) for s in window.device]
    host = [
        HostSpan(s.phase if s.step in range(10, 30) else "intake", s.step, s.begin, s.end)
        for s in window.host
    ]
    write_timeline(tmp_path, "w0", Timeline("async", True, host, device), after=5)
    drawn = colours(tmp_path / "w0.png")
    assert {_BLUE, _PALE_BLUE, _RED} <= drawn


def test_without_matplotlib_the_trace_is_there_and_the_way_to_a_picture_is_said(tmp_path, without_matplotlib):
    said = write_timeline(tmp_path, "w0", steps(), after=5)
    assert "pip install 'tokenmill[timeline]'" in said
    assert f"python -m pipeline.report.timeline {tmp_path}/w0.json {tmp_path}/w0.png" in said
    assert read_trace(tmp_path / "w0.json").busy_share == pytest.approx(5 / 6)
    assert not (tmp_path / "w0.png").exists()


@pytest.mark.parametrize("recorded", [None, Timeline("sync", False, [], [])])
def test_a_window_that_was_never_reached(tmp_path, recorded):
    said = write_timeline(tmp_path / "timeline", "w0", recorded, after=20)
    assert "first 20" in said and "engine.timeline_after" in said
    assert not (tmp_path / "timeline").exists()


def test_the_command_draws_a_trace_from_elsewhere(tmp_path):
    pytest.importorskip("matplotlib")
    write_trace(tmp_path / "there.json", steps())
    command = [sys.executable, "-m", "pipeline.report.timeline", "there.json", "new/picture.png"]
    environment: dict[str, Any] = {"PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)}
    subprocess.run(command, cwd=tmp_path, check=True, env=environment)
    assert {_BLUE, _PALE_BLUE, _RED} <= colours(tmp_path / "new" / "picture.png")


class TestCommand:
    def test_says_how_it_is_used(self, capsys):
        assert main([]) == 2
        assert "TRACE.json OUT.png" in capsys.readouterr().err

    def test_names_a_file_that_is_no_trace(self, tmp_path, capsys):
        (tmp_path / "x.json").write_text("{}")
        assert main([str(tmp_path / "x.json"), str(tmp_path / "x.png")]) == 1
        assert "x.json is no timeline" in capsys.readouterr().err

    def test_names_what_is_missing(self, tmp_path, capsys, without_matplotlib):
        write_trace(tmp_path / "x.json", steps())
        assert main([str(tmp_path / "x.json"), str(tmp_path / "x.png")]) == 1
        assert "tokenmill[timeline]" in capsys.readouterr().err
