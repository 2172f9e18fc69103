"""The caller's requests, pulled one by one and never sooner than they are wanted."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.request import Request

# How long a wait may last before the engine's loop looks at its other work, stopping included.
_TURN_S = 0.05


class Feed:
    """An iterable with `ready()` (a background tokeniser) is waited for only when nothing else is to do; with
    `wait(seconds)`, which says the same after so long at most, never for more than a moment."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._iterator = iter(requests)
        self._ready = getattr(requests, "ready", None)
        self._wait = getattr(requests, "wait", None)
        self.exhausted = False

    def next(self, may_wait: bool) -> Request | None:
        """The next request; None when there is none left, or none yet."""
        if self.exhausted or not self._is_there(may_wait):
            return None
        request = next(self._iterator, None)
        self.exhausted = request is None
        return request

    def _is_there(self, may_wait: bool) -> bool:
        if may_wait:
            return self._wait is None or self._wait(_TURN_S)
        return self._ready is None or self._ready()
