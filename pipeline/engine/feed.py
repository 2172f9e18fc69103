"""The caller's requests, pulled one by one and never sooner than they are wanted."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.request import Request


class Feed:
    """An iterable with `ready()` (a background tokeniser) is waited for only when nothing else is to do."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._iterator = iter(requests)
        self._ready = getattr(requests, "ready", None)
        self.exhausted = False

    def next(self, may_wait: bool) -> Request | None:
        """The next request; None when there is none left, or none yet and waiting is not wanted."""
        if self.exhausted or (self._ready is not None and not may_wait and not self._ready()):
            return None
        request = next(self._iterator, None)
        self.exhausted = request is None
        return request
