"""Signals that ask a job to stop: noticed at once, obeyed at the next step.

USR1 and TERM are what a cluster sends before it takes a machine away, INT is Ctrl-C. The job
commits what is finished and leaves; a second INT leaves at once. Knows signals; refuses to know
what there is to save.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
_HANDLED = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class _Stopped(BaseException):
    """Ends a call in which nothing is to be saved; no handler for errors is to catch it."""


class StopSignals:
    """Context manager: while entered, `received` is the first stop signal that came, else None."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}
        self._at_once = False

    def __enter__(self) -> StopSignals:
        # Python delivers signals to the main thread only; elsewhere (a library's use) they are not ours.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _HANDLED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def unless_stopped(self, call: Callable[[], T]) -> T | None:
        """What `call` returns; None if a stop signal came before it was over, which ends it at once."""
        try:
            self._at_once = True
            return None if self.received is not None else call()
        except _Stopped:
            return None
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
        if self._at_once:
            self._at_once = False
            raise _Stopped
