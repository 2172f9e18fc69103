"""A background thread that works ahead of its consumer, by a bounded number of items.

Knows: one thread, one bounded queue, and how both end. Refuses to know what the items are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

# How long close() waits for a thread that is inside the iterable, e.g. in a read from a dead server.
_JOIN_S = 5.0


class ReadAhead(Generic[T], Iterator[T]):
    """Iterates over `iterable` in a daemon thread, at most `bound` items ahead; the order is kept.

    An exception of the iterable is raised in the consumer with its own traceback, after the items
    that came before it, and again at every later next(): a failed input never looks like a finished
    one. Use as a context manager, or call close(). One consumer.
    """

    def __init__(self, iterable: Iterable[T], bound: int) -> None:
        assert bound >= 1
        self._iterable = iterable
        self._bound = bound
        self._items: deque[T] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._closed = False
        # Guards all of the above; notified at every change of them.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> ReadAhead[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(self._is_ready)
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise StopIteration

    def ready(self) -> bool:
        """Whether next() returns (or ends, or raises) without waiting."""
        with self._changed:
            return self._is_ready()

    def wait(self, seconds: float) -> bool:
        """Waits until it is ready, for so long at most; whether it is."""
        with self._changed:
            return self._changed.wait_for(self._is_ready, seconds)

    def close(self) -> None:
        """Ends the thread, also when it waits for room; what it had ready is dropped. May be repeated.

        The iterable is closed in its own thread. A consumer that waits in next() sees the end.
        """
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_ready(self) -> bool:
        return bool(self._items) or self._ended or self._closed

    def _fill(self) -> None:
        try:
            iterator = iter(self._iterable)
            try:
                self._copy(iterator)
            finally:
                # A generator holds open files until it is closed, and only its own thread may do that.
                close = getattr(iterator, "close", None)
                if close is not None:
                    close()
        except BaseException as error:  # whatever it is, the consumer must hear of it
            with self._changed:
                self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _copy(self, iterator: Iterator[T]) -> None:
        for item in iterator:
            with self._changed:
                self._changed.wait_for(lambda: len(self._items) < self._bound or self._closed)
                if self._closed:
                    return
                self._items.append(item)
                self._changed.notify_all()
