"""The thread that keeps a worker's record fresh while its main thread computes.

Knows: one thread, and when to beat. Refuses to know: what is in the record.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from pipeline.cluster.workers import Member

# News (a unit was begun) goes out ahead of its time, but not more often than this.
_LEAST_INTERVAL_S = 0.5


class Heartbeat:
    """Context manager: while entered the worker lives, after it it has left.

    Beats every interval_s seconds, and soon after member.news is set. held: what the record says of units. An
    error of the file system is no reason to stop: the next beat may succeed, and if none does the others
    take the units over.
    """

    def __init__(
        self, member: Member, held: Callable[[], Sequence[tuple[int, bool]]], interval_s: float
    ) -> None:
        self._member = member
        self._held = held
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        self._member.news.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            # if even that cannot be written, silence will say it
            self._member.leave("done" if kind is None else kind.__name__)

    def _run(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(OSError):
                self._member.beat(self._held())
            self._ended.wait(min(_LEAST_INTERVAL_S, self._interval_s))
            self._member.news.wait(max(self._interval_s - _LEAST_INTERVAL_S, 0.0))
            self._member.news.clear()
