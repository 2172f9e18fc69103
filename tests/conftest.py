"""Fixtures that more than one room's tests use."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from s3_server import S3Server

from pipeline.config import JobConfig


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large", action="store_true", help="run the tests marked `large` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--large"):
        for item in items:
            if item.get_closest_marker("large"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: run it with --large"))


@dataclass(frozen=True)
class CommandResult:
    """How a command ended, and the jobs it would have run."""

    code: int
    out: str
    err: str
    jobs: list[JobConfig]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., CommandResult]]:
    """`command("conf=demo", ...)`: the command line in an empty directory, the job itself replaced.

    `job=` replaces it with something else than a note of its configuration.
    """
    from pipeline.cli import main

    monkeypatch.chdir(tmp_path)
    for name in ("HYDRA_FULL_ERROR", "TOKENMILL_TRACEBACK", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.setenv(name, "")  # so that what a run sets is undone
        monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*arguments: str, job: Callable[[JobConfig], object] | None = None) -> CommandResult:
        jobs: list[JobConfig] = []
        fake = types.ModuleType("pipeline.job")

        def run_job(config: JobConfig, worker: str, start_up: object) -> types.SimpleNamespace:
            (job or jobs.append)(config)
            return types.SimpleNamespace(exit_code=0)

        fake.run_job = run_job  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "pipeline.job", fake)
        monkeypatch.setattr(sys, "argv", ["tokenmill", *arguments])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return CommandResult(code, captured.out, captured.err, jobs)

    yield run
    root.handlers[:], root.level = handlers, level


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    missing = [name for name in ("moto", "flask_cors", "s3fs") if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"no {', '.join(missing)}: pip install -e '.[s3-test]'"
        # For a machine that is to run these tests: without this their absence would go unnoticed.
        if os.environ.get("TOKENMILL_REQUIRE_S3") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with S3Server() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """The server, found by the environment as by any user of s3fs, and a bucket of the test's own."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    s3_server.make_bucket()
    yield s3_server
    s3_server.behave()
