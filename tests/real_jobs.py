"""Real jobs through the real command line, started in a tenth of the time.

A server process imports torch and transformers once and forks a child for each command; the child runs
`python -m pipeline.<verb>` as its own program would, and can be killed without the server noticing. Run as a
script this module is that server, imported it is the tests' side of it. Knows: commands, files of rows,
faults to put into a child. Refuses to know: what a test expects.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).resolve().parent.parent
TINY_MODEL = REPOSITORY / "pipeline" / "assets" / "tiny-model"
# A job of the tests' own rows on the shipped model, free of the demo's choices.
OWN_JOB = ("conf=generate", "model=tiny", "cost=free", "report.interval_s=1000")
_PATIENCE_S = 60.0


@dataclass(frozen=True)
class Ended:
    """How a command ended. code: as a shell counts it, 128 + n for signal n. seconds: from its start."""

    code: int
    out: str
    err: str
    seconds: float


@dataclass
class Running:
    """A command that was started. One at a time."""

    server: CommandServer
    pid: int
    files: tuple[Path, Path]
    started: float = field(default_factory=time.monotonic)
    ended: Ended | None = None

    def send(self, number: signal.Signals) -> None:
        """A signal, unless the command is over."""
        if not self.is_over():
            os.kill(self.pid, number)

    def err(self) -> str:
        """Its standard error so far."""
        return self.files[1].read_text(errors="replace") if self.files[1].exists() else ""

    def is_over(self, within: float = 0.0) -> bool:
        if self.ended is None:
            reply = self.server.reply(within)
            if reply is not None:
                texts = [path.read_text(errors="replace") for path in self.files]
                self.ended = Ended(reply["code"], *texts, time.monotonic() - self.started)
        return self.ended is not None

    def wait(self, seconds: float = _PATIENCE_S) -> Ended:
        if not self.is_over(seconds):
            self.send(signal.SIGKILL)
            self.is_over(_PATIENCE_S)
            raise AssertionError(f"still running after {seconds} s: {self.ended}")
        assert self.ended is not None
        return self.ended

    def until(self, happened: Callable[[], bool], seconds: float = _PATIENCE_S) -> bool:
        """Waits for something to happen; False if the command ended before."""
        deadline = time.monotonic() + seconds
        while not happened():
            if self.is_over(0.002):
                return happened()
            assert time.monotonic() < deadline, f"nothing happened in {seconds} s"
        return True


class CommandServer:
    """Starts commands. Context manager."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="commands-"))
        self._count = 0
        self._heard = b""
        self._last: Running | None = None
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(self._folder)}
        for name in ("HYDRA_FULL_ERROR", "TOKENMILL_TRACEBACK", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
            env.pop(name, None)
        env["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), env.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            bufsize=0,
        )

    def start(
        self, *arguments: str, cwd: Path, verb: str = "run", fault: Mapping[str, Any] | None = None
    ) -> Running:
        """`python -m pipeline.<verb> <arguments>` in the folder cwd. fault: a name in
        `_FAULTS` with its value."""
        if self._last is not None and not self._last.is_over():
            # left behind by a test that failed
            self._last.send(signal.SIGKILL)
            self._last.is_over(_PATIENCE_S)
        self._count += 1
        files = (self._folder / f"{self._count}.out", self._folder / f"{self._count}.err")
        order = {
            "verb": verb,
            "arguments": [str(argument) for argument in arguments],
            "cwd": str(cwd),
            "files": [str(path) for path in files],
            "fault": dict(fault or {}),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        reply = self.reply(_PATIENCE_S)
        assert reply is not None, "the server does not answer"
        self._last = Running(self, reply["pid"], files)
        return self._last

    def run(self, *arguments: str, cwd: Path, seconds: float = _PATIENCE_S, **options: Any) -> Ended:
        return self.start(*arguments, cwd=cwd, **options).wait(seconds)

    def reply(self, within: float) -> dict[str, Any] | None:
        """The server's next word, which comes only when one is due: a command's start, then its end."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + within
        while b"\n" not in self._heard:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([self._process.stdout], [], [], left)[0]:
                return None
            heard = os.read(self._process.stdout.fileno(), 4096)
            assert heard, "the server is gone"
            self._heard += heard
        line, _, self._heard = self._heard.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def __enter__(self) -> CommandServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_PATIENCE_S)
        shutil.rmtree(self._folder)


def committed_rows(job: Path) -> int:
    """Results that the journals speak of, also while the job runs."""
    rows = 0
    for journal in (job / "journal").glob("*.jsonl"):
        for line in journal.read_text().split("\n")[:-1]:
            rows += json.loads(line).get("rows", 0)
    return rows


def questions(num_rows: int) -> list[dict[str, Any]]:
    """Rows such as the shipped model was made for; some are asked twice."""
    days = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
    kinds = (
        lambda i: f"Compute {i % 90 + 7} + {i % 13}.",
        lambda i: f"Which day comes after {days[i % 5]}?",
        lambda i: f"Which number is larger, {i % 97} or {i % 31 + 50}?",
        lambda i: "Tell a story.",
    )
    return [
        {"question": kinds[i % 4](i), "kind": i % 4, "tags": [f"t{i % 3}"] if i % 5 else None}
        for i in range(num_rows)
    ]


def write_questions(path: Path, num_rows: int, row_group_size: int = 64) -> None:
    table = pa.Table.from_pylist(questions(num_rows))
    pq.write_table(table, path, row_group_size=row_group_size)


def files_under(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# ---------------------------------------------------------------- the server's side


def _serve() -> None:
    # What a job imports; nothing is computed here, so that a fork finds no thread of torch's.
    import pipeline.finalize
    import pipeline.input.hf
    import pipeline.job
    import pipeline.prepare
    import pipeline.status
    import pipeline.verify  # noqa: F401

    replies = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            replies.close()
            _become(order)
        replies.write(json.dumps({"pid": pid}) + "\n")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        replies.write(json.dumps({"code": 128 - code if code < 0 else code}) + "\n")


def _become(order: dict[str, Any]) -> None:
    """What `python -m` would be. Never returns."""
    code = 1
    try:
        for number, name in enumerate(("/dev/null", *order["files"])):
            descriptor = os.open(name, (os.O_WRONLY | os.O_CREAT) if number else os.O_RDONLY, 0o666)
            os.dup2(descriptor, number)
        os.chdir(order["cwd"])
        sys.argv = [f"pipeline.{order['verb']}", *order["arguments"]]
        for name, value in order["fault"].items():
            _FAULTS[name](value)
        sys.modules.pop(f"pipeline.{order['verb']}", None)
        runpy.run_module(f"pipeline.{order['verb']}", run_name="__main__", alter_sys=True)
        code = 0
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


_DURABLE = ("create", "write", "fsync_file", "fsync_directory", "rename", "link")


def _kill_at_step(number: int) -> None:
    """The process kills itself before its `number`-th operation on the disk, counted from 0."""
    from pipeline import durable

    done = 0

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object) -> object:
            nonlocal done
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return real(*arguments)

        return step

    for name in _DURABLE:
        setattr(durable, name, counted(getattr(durable, name)))


def _kill_in_close(number: int) -> None:
    """The process kills itself at the `number`-th operation of a part's close."""
    from pipeline.output.part import PartWriter

    close = PartWriter.close

    def killed(part: PartWriter) -> None:
        _kill_at_step(number)
        close(part)

    PartWriter.close = killed  # type: ignore[method-assign]


def _step_fails(number: int) -> None:
    """The `number`-th step of the model raises."""
    _replace_step(lambda step: _raise(RuntimeError("the step failed on purpose")) if step == number else None)


def _slow_steps(seconds: float) -> None:
    """Every step of the model says so and takes so much longer."""

    def wait(step: int) -> None:
        print("in a step", file=sys.stderr, flush=True)
        time.sleep(seconds)

    _replace_step(wait)


def _raise(error: Exception) -> None:
    raise error


def _replace_step(before: Callable[[int], None]) -> None:
    from pipeline.engine.model_runner import ModelRunner

    real, count = ModelRunner.run, 0

    def run(self: Any, inputs: Any) -> Any:
        nonlocal count
        count += 1
        before(count - 1)
        return real(self, inputs)

    ModelRunner.run = run  # type: ignore[method-assign]


def _disk_of(num_bytes: int) -> None:
    """Stands in for a small disk: the write that passes `num_bytes` in all is cut there and fails."""
    from pipeline import durable

    real, left = durable.write, num_bytes

    def write(descriptor: int, data: bytes | memoryview) -> None:
        nonlocal left
        view = memoryview(data).cast("B")
        real(descriptor, view[:left])
        if len(view) > left:
            left = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= len(view)

    durable.write = write


_FAULTS: dict[str, Callable[[Any], None]] = {
    "kill_at_step": _kill_at_step,
    "kill_in_close": _kill_in_close,
    "step_fails": _step_fails,
    "slow_steps": _slow_steps,
    "disk_of": _disk_of,
}

if __name__ == "__main__":
    _serve()
