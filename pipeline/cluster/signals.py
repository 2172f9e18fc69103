"""Signals that ask a job to stop: noticed at once, obeyed at the next step.

USR1 and TERM are what a cluster sends before it takes a machine away, INT is Ctrl-C. The job
commits what is finished and leaves; a second INT leaves at once. Knows signals; refuses to know
what there is to save.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

_HANDLED = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context manager: while entered, `received` is the first stop signal that came, else None."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        # Python delivers signals to the main thread only; elsewhere (a library's use) they are not ours.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _HANDLED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
