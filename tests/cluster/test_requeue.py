"""When a task asks Slurm for another life, and how."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pipeline.cluster.requeue import EXIT_REQUEUE, Stop, leave, wants_back
from pipeline.config import ClusterConfig, Requeue

END = 1_800_000_000.0
ARRAY = {
    "SLURM_JOB_ID": "40",
    "SLURM_ARRAY_JOB_ID": "40",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_JOB_END_TIME": str(int(END)),
}
WARNED = Stop(signal.SIGUSR1)
CODE = 128 + signal.SIGUSR1


@pytest.mark.parametrize(
    ("stop", "now", "back"),
    [
        (WARNED, END - 100, True),
        # scancel, or what Slurm brings back by itself
        (Stop(signal.SIGTERM), END - 100, False),
        # the limit itself; the controller's clock may be a little ahead
        (Stop(signal.SIGTERM), END - 5, True),
        (Stop(signal.SIGTERM), END + 30, True),
        (Stop(signal.SIGINT), END + 30, False),
        # no unit could have been finished
        (Stop(out_of_time=True), END - 300, True),
        # the rest is with others, or the budget is spent
        (Stop(), END - 300, False),
    ],
)
def test_only_the_clock_is_a_reason_to_come_back(stop: Stop, now: float, back: bool) -> None:
    assert wants_back(stop, END, now) is back


def test_term_is_no_reason_where_nobody_knows_the_end() -> None:
    assert not wants_back(Stop(signal.SIGTERM), None, END)


def unfinished() -> bool:
    return False


class Scontrol:
    """A command on PATH that notes its arguments, and fails if told to."""

    def __init__(self, folder: Path, code: int = 0) -> None:
        self._calls = folder / "calls"
        script = folder / "scontrol"
        script.write_text(f'#!/bin/sh\necho "$@" >>"{self._calls}"\necho "no way" >&2\nexit {code}\n')
        script.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scontrol:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Scontrol(tmp_path)


def config(how: Requeue, max_restarts: int = 2) -> ClusterConfig:
    return ClusterConfig(requeue=how, max_restarts=max_restarts)


@pytest.mark.parametrize(
    ("environment", "name"), [(ARRAY, "40_3"), ({"SLURM_JOB_ID": "40", "SLURM_RESTART_COUNT": "1"}, "40")]
)
def test_a_task_asks_for_itself_alone(
    scontrol: Scontrol, capsys: pytest.CaptureFixture[str], environment: dict[str, str], name: str
) -> None:
    assert leave(CODE, WARNED, unfinished, config(Requeue.scontrol), environment) == CODE
    assert scontrol.calls == [f"requeue {name}"]
    assert f"{name} comes back" in capsys.readouterr().err


def test_a_script_around_it_is_told_by_the_exit_code(scontrol: Scontrol) -> None:
    assert leave(CODE, WARNED, unfinished, config(Requeue.exit_code), ARRAY) == EXIT_REQUEUE
    assert scontrol.calls == []
    launch = Path(__file__).resolve().parents[2] / "jobs" / "launch.sh"
    assert f"\nREQUEUE_CODE={EXIT_REQUEUE}\n" in launch.read_text()


@pytest.mark.parametrize(
    ("how", "environment"),
    [
        (Requeue.never, ARRAY),
        (Requeue.scontrol, {}),
        (Requeue.exit_code, {}),
        (Requeue.scontrol, {**ARRAY, "SLURM_RESTART_COUNT": "2"}),
        (Requeue.exit_code, {**ARRAY, "SLURM_RESTART_COUNT": "7"}),
    ],
)
def test_nobody_is_asked_otherwise(scontrol: Scontrol, how: Requeue, environment: dict[str, str]) -> None:
    assert leave(CODE, WARNED, unfinished, config(how), environment) == CODE
    assert scontrol.calls == []


def test_the_last_life_says_that_it_is_the_last(
    scontrol: Scontrol, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(CODE, WARNED, unfinished, config(Requeue.scontrol), {**ARRAY, "SLURM_RESTART_COUNT": "2"})
    assert "40_3 has had its cluster.max_restarts=2" in capsys.readouterr().err


def test_a_complete_job_needs_nobody_back(scontrol: Scontrol) -> None:
    assert leave(CODE, WARNED, lambda: True, config(Requeue.scontrol), ARRAY) == 0
    assert scontrol.calls == []


def test_whether_it_is_complete_is_asked_only_if_it_matters(scontrol: Scontrol) -> None:
    def must_not_ask() -> bool:
        raise AssertionError("asked")

    assert [leave(c, Stop(), must_not_ask, config(Requeue.scontrol), ARRAY) for c in (0, 75)] == [0, 75]
    assert leave(CODE, WARNED, must_not_ask, config(Requeue.never), ARRAY) == CODE


def test_a_refusal_is_told_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    refused = Scontrol(tmp_path, code=1)
    assert leave(CODE, WARNED, unfinished, config(Requeue.scontrol), ARRAY) == CODE
    assert refused.calls == ["requeue 40_3"] and "refused: no way" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert leave(CODE, WARNED, unfinished, config(Requeue.scontrol), ARRAY) == CODE
    assert "scontrol requeue 40_3 could not be run" in capsys.readouterr().err
