"""Worker processes on this machine: started together, told together to stop, and what became of each.

Knows: processes, signals, exit codes, the logs that processes write to. Refuses to know: what a worker does,
and the job. Nobody is started a second time: what ends a worker at once would end it again, and whatever it
leaves undone the others make.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

_FORWARDED = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
# What a worker's last words begin with, see failures.py; no more than so much of them is read.
_WORDS = "tokenmill: "
_LAST_BYTES = 16 * 1024


@dataclass(frozen=True)
class WorkerCommand:
    """How a worker is started. log: what it prints is appended there. environment: the whole of it."""

    name: str
    words: Sequence[str]
    environment: Mapping[str, str]
    log: Path


@dataclass(frozen=True)
class Ended:
    """A worker that is over. code: as the shell counts, 128 + N for the signal `by`. words: its last ones, if
    it said what was wrong."""

    name: str
    code: int
    by: signal.Signals | None
    words: str | None
    log: Path


@dataclass
class _Running:
    command: WorkerCommand
    process: subprocess.Popen[bytes]
    log_begin: int


class LocalWorkers:
    """Context manager: entering starts the processes, leaving it kills those that still run.

    received: the first signal that asked this process to stop. Signals are handed on by `poll`, to workers
    in groups of their own: what a terminal sends reaches this process alone.
    """

    def __init__(self, commands: Sequence[WorkerCommand]) -> None:
        self.received: signal.Signals | None = None
        self._commands = commands
        self._running: list[_Running] = []
        self._arrived: list[signal.Signals] = []
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> LocalWorkers:
        for number in _FORWARDED:
            # whoever ignores the hang-up (nohup) goes on
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        try:
            tie = _tie_to_this_process()
            for command in self._commands:
                if not self._arrived:
                    self._running.append(_start(command, tie))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._running:
            worker.process.kill()
            worker.process.wait()
        self._running = []
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    def poll(self) -> list[Ended]:
        """Hands on what signals have come, and tells who has ended since the last time."""
        while self._arrived:
            self._hand_on(self._arrived.pop(0))
        over = [worker for worker in self._running if worker.process.poll() is not None]
        self._running = [worker for worker in self._running if worker not in over]
        return [_ended(worker) for worker in over]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(signal.Signals(number))

    def _hand_on(self, number: signal.Signals) -> None:
        again = number is signal.SIGINT and self.received is not None
        self.received = self.received or number
        # a hang-up would end a worker before it has committed
        told = signal.SIGTERM if number is signal.SIGHUP else number
        for worker in self._running:
            worker.process.send_signal(signal.SIGKILL if again else told)


def _start(command: WorkerCommand, tie: Callable[[], None] | None) -> _Running:
    command.log.parent.mkdir(parents=True, exist_ok=True)
    with open(command.log, "ab") as log:
        begin = log.tell()
        process = subprocess.Popen(
            command.words,
            env=dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
            preexec_fn=tie,
        )
        return _Running(command, process, begin)


def _tie_to_this_process() -> Callable[[], None] | None:
    """For a new process: asks Linux to tell it to stop should this one be killed; None elsewhere."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None
    number = int(signal.SIGTERM)
    return lambda: prctl(_PR_SET_PDEATHSIG, number)


def _ended(worker: _Running) -> Ended:
    code = worker.process.returncode
    by = signal.Signals(-code) if code < 0 else None
    command = worker.command
    words = _last_words(command.log, worker.log_begin) if code > 0 else None
    return Ended(command.name, 128 - code if by else code, by, words, command.log)


def _last_words(log: Path, begin: int) -> str | None:
    """What a worker said last of what went wrong; None if nothing."""
    with open(log, "rb") as file:
        file.seek(max(begin, os.fstat(file.fileno()).st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    places = [place for place, line in enumerate(lines) if line.startswith(_WORDS)]
    return "\n".join(lines[places[-1] :]).removeprefix(_WORDS) if places else None


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Starts no CUDA."""
    given = environment.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(number) for number in range(_num_gpus())]
    gpus = []
    for name in (name.strip() for name in given.split(",")):
        if not (name.isdigit() or name.startswith(("GPU-", "MIG-"))):
            # as CUDA reads it: the first name that is none ends the list
            break
        gpus.append(name)
    return gpus


def _num_gpus() -> int:
    try:
        listing = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
