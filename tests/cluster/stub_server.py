"""Forks workers without a model from a process that has imported what they need: a life costs little.

Runs as a process of its own, so that no thread of the tests is forked. Orders are lines of JSON on standard
input, answers (pid) on standard output; an ended worker's code appears in a file. In a worker, the functions
of pipeline/durable.py may be made to kill it, at a point that has a name; it leaves a mark first.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Point:
    """Where a process dies: a function of `durable`, on which path, when. half: of what it was to write."""

    function: str
    path: str
    when: str
    data: str = ""


_END = "\\xff\\xff\\xff\\xff\\x00\\x00\\x00\\x00"
POINTS = {
    "a part's bytes half written": Point("write", "/parts/", "half"),
    "in the fsync of a part": Point("fsync_file", "/parts/", "before"),
    "after the fsync of a part": Point("fsync_file", "/parts/", "after"),
    "before the line of a journal": Point("write", "/journal/", "before"),
    "the line of a journal half written": Point("write", "/journal/", "half"),
    "in the fsync of a journal": Point("fsync_file", "/journal/", "before"),
    "after the fsync of a journal": Point("fsync_file", "/journal/", "after"),
    "in the fsync of a lease": Point("fsync_file", "/leases/", "before"),
    "before the link of a lease": Point("link", "/leases/", "before"),
    "after the link of a lease": Point("link", "/leases/", "after"),
    "in the fsync of the leases' folder": Point("fsync_directory", "/leases/", "before"),
    "before the rename of a record": Point("rename", "/workers/", "before"),
    "after the rename of a record": Point("rename", "/workers/", "after"),
    "before the roll-over's new part": Point("create", r"/parts/.*-0*[1-9]\d*\.arrow$", "before"),
    "after the roll-over's new part": Point("create", r"/parts/.*-0*[1-9]\d*\.arrow$", "after"),
    "before the roll-over's new journal": Point("create", r"/journal/.*-0*[1-9]\d*\.jsonl$", "before"),
    "before the end of a part": Point("write", "/parts/", "before", _END),
    "after the end of a part": Point("write", "/parts/", "after", _END),
    "before a journal is closed": Point("write", "/journal/", "before", '"kind":"closed"'),
    "in the closing of a journal": Point("write", "/journal/", "half", '"kind":"closed"'),
}
FINALIZE_POINTS = {
    "before a shard is made": Point("create", r"\.dataset\.new[^/]*/", "before"),
    "a shard half written": Point("write", r"\.dataset\.new[^/]*/", "half"),
    "in the fsync of a shard": Point("fsync_file", r"\.dataset\.new[^/]*/", "before"),
    "before the rename of a shard": Point("rename", r"\.dataset\.new[^/]*/data", "before"),
    "before the rename of the dataset": Point("rename", r"/dataset$", "before"),
    "after the rename of the dataset": Point("rename", r"/dataset$", "after"),
}


@dataclass
class Running:
    """A worker. code: None while it runs."""

    pid: int
    files: Path

    @property
    def code(self) -> int | None:
        path = self.files.with_suffix(".code")
        return int(path.read_text()) if path.exists() else None

    @property
    def err(self) -> str:
        return self.files.with_suffix(".err").read_text(errors="replace")

    @property
    def hit(self) -> str | None:
        """The point at which it died."""
        path = self.files.with_suffix(".mark")
        return path.read_text() if path.exists() else None

    def send(self, number: signal.Signals) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def wait(self) -> int:
        deadline = time.monotonic() + _PATIENCE_S
        while (code := self.code) is None:
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
                raise AssertionError(f"{self.pid} still runs: {self.err[-2000:]}")
            time.sleep(0.005)
        return code


class StubServer:
    """Context manager. Workers that still run when it is left are killed."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="stub-"))
        self._started: list[Running] = []
        paths = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        for name in [name for name in environment if name.startswith("SLURM_")]:
            del environment[name]
        environment["STUB_LOADS"] = str(self.folder / "loads")
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def start(
        self,
        *arguments: str,
        row_s: float = 0.0,
        fault: Mapping[str, Any] | None = None,
        verb: str | None = None,
    ) -> Running:
        """`run_job` with an engine that takes row_s seconds a row; arguments as on the command line.

        verb: `python -m pipeline.<verb> <arguments>` instead; hydra takes longer than such a job.
        fault: {"kill": (name of a point, at its n-th time)}, {"full": at which write}, {"jump": seconds}.
        """
        files = self.folder / f"{len(self._started)}"
        order = {
            "arguments": arguments,
            "verb": verb,
            "row_s": row_s,
            "fault": dict(fault or {}),
            "files": str(files),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        running = Running(int(self._process.stdout.readline()), files)
        self._started.append(running)
        return running

    def __enter__(self) -> StubServer:
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._started:
            with contextlib.suppress(ProcessLookupError):
                running.send(signal.SIGKILL)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_PATIENCE_S)
        shutil.rmtree(self.folder)


# ---------------------------------------------------------------- the server's side


def _serve() -> None:
    import pipeline.cluster.join
    import pipeline.finalize
    import pipeline.input.parquet
    import pipeline.job
    import pipeline.run
    import pipeline.schema_store  # noqa: F401

    running: dict[int, Path] = {}
    heard = b""
    while True:
        _note_ended(running)
        if not select.select([0], [], [], 0.005)[0]:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            return
        heard += chunk
        *lines, heard = heard.split(b"\n")
        for line in lines:
            order = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _become(order)
            running[pid] = Path(order["files"])
            os.write(1, f"{pid}\n".encode())


def _note_ended(running: dict[int, Path]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        files = running.pop(pid)
        whole = files.with_suffix(".code.new")
        whole.write_text(str(os.waitstatus_to_exitcode(status)))
        whole.rename(files.with_suffix(".code"))


def _become(order: dict[str, Any]) -> None:
    """What `python stub_run.py -m pipeline.<verb>` would be. Never returns."""
    code = 1
    files = Path(order["files"])
    try:
        for number, suffix in ((0, None), (1, ".out"), (2, ".err")):
            name = "/dev/null" if suffix is None else str(files.with_suffix(suffix))
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT, 0o666), number)
        os.environ["STUB_ROW_S"] = str(order["row_s"])
        _install(order["fault"], files.with_suffix(".mark"))
        code = _run_verb(order) if order["verb"] else _run_job(order["arguments"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_verb(order: dict[str, Any]) -> int:
    from cluster import stub_run

    verb = f"pipeline.{order['verb']}"
    sys.modules.pop(verb, None)
    sys.argv = ["stub_run.py", "-m", verb, *order["arguments"]]
    stub_run.main()
    return 0


def _run_job(arguments: list[str]) -> int:
    from cluster import stub_run

    from pipeline.job import run_job
    from pipeline.schema_store import worker_name

    stub_run.take_the_place_of_prepare()
    return run_job(_config(arguments), worker_name()).exit_code


def _config(arguments: list[str]) -> Any:
    """What hydra would make of `a.b=value`; `source=parquet` is understood."""
    from pipeline.config import JobConfig, ParquetSource, PromptConfig

    config = JobConfig(source=ParquetSource(path=""), prompt=PromptConfig(column=""))
    for argument in arguments:
        key, _, text = argument.partition("=")
        *groups, name = key.split(".")
        owner: Any = config
        for group in groups:
            owner = getattr(owner, group)
        if groups:
            setattr(owner, name, float(text) if re.fullmatch(r"\d+\.\d+", text) else _whole(text))
    return config


def _whole(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _install(fault: dict[str, Any], mark: Path) -> None:
    if "kill" in fault:
        name, nth = fault["kill"]
        _kill_at(name, {**POINTS, **FINALIZE_POINTS}[name], nth, mark)
    if "full" in fault:
        _full_at(fault["full"], mark)
    if "jump" in fault:
        _jump(fault["jump"])


def _kill_at(name: str, point: Point, nth: int, mark: Path) -> None:
    from pipeline import durable

    real: Callable[..., Any] = getattr(durable, point.function)
    hits = 0

    def die() -> None:
        mark.write_text(name)
        os.kill(os.getpid(), signal.SIGKILL)

    def step(*arguments: Any) -> Any:
        nonlocal hits
        fits = re.search(point.path, _path_of(point.function, arguments)) and _holds(arguments, point.data)
        hits += bool(fits)
        if not fits or hits != nth:
            return real(*arguments)
        if point.when == "half":
            real(arguments[0], memoryview(arguments[1]).cast("B")[: memoryview(arguments[1]).nbytes // 2])
        if point.when == "after":
            real(*arguments)
        die()

    setattr(durable, point.function, step)


def _path_of(function: str, arguments: tuple[Any, ...]) -> str:
    if function in ("write", "fsync_file"):
        return os.readlink(f"/proc/self/fd/{arguments[0]}")
    if function == "fsync_directory":
        return f"{arguments[0]}/"
    return str(arguments[-1])


def _holds(arguments: tuple[Any, ...], data: str) -> bool:
    return not data or data.encode("latin-1").decode("unicode_escape").encode("latin-1") in bytes(
        arguments[1]
    )


def _full_at(number: int, mark: Path) -> None:
    """The disk is full at the number-th write and from then on; a part of it still fits."""
    from pipeline import durable

    real, done = durable.write, 0

    def write(descriptor: int, data: bytes | memoryview) -> None:
        nonlocal done
        done += 1
        if done < number:
            real(descriptor, data)
            return
        mark.write_text("full")
        if done == number:
            view = memoryview(data).cast("B")
            real(descriptor, view[: len(view) // 3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    durable.write = write


def _jump(seconds: float) -> None:
    """The wall clock jumps so far a moment after the start."""
    real, begun = time.time, time.monotonic()
    time.time = lambda: real() + (seconds if time.monotonic() - begun > 0.1 else 0.0)


if __name__ == "__main__":
    _serve()
