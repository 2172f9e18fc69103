from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator

import pytest

from pipeline.prompts.read_ahead import ReadAhead


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


class Counter:
    """Counts up, and remembers how far it was asked and whether it was closed."""

    def __init__(self, count: int) -> None:
        self.count, self.made, self.closed_in = count, 0, ""

    def __iter__(self) -> Iterator[int]:
        try:
            while self.made < self.count:
                self.made += 1
                yield self.made - 1
        finally:
            self.closed_in = threading.current_thread().name


def test_keeps_order_and_ends() -> None:
    with ReadAhead(Counter(5000), bound=7) as items:
        assert list(items) == list(range(5000))
        with pytest.raises(StopIteration):
            next(items)


def test_works_ahead_by_its_bound_and_no_further() -> None:
    counter = Counter(1000)
    with ReadAhead(counter, bound=3) as items:
        # three queued, and one in the thread's hand
        assert eventually(lambda: counter.made == 4)
        time.sleep(0.05)
        assert counter.made == 4
        assert next(items) == 0
        assert eventually(lambda: counter.made == 5)


def test_ready_says_whether_next_would_wait() -> None:
    gate = threading.Semaphore(0)

    def gated() -> Iterator[int]:
        for i in range(2):
            gate.acquire()
            yield i
        gate.acquire()

    with ReadAhead(gated(), bound=4) as items:
        assert not items.ready()
        gate.release()
        assert eventually(items.ready)
        assert next(items) == 0
        assert not items.ready()
        gate.release()
        assert next(items) == 1
        assert not items.ready()
        gate.release()
        # the end is an answer, too
        assert eventually(items.ready)
        assert list(items) == []


def test_an_exception_arrives_after_the_items_before_it_with_its_traceback_and_stays() -> None:
    def broken_reader() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("disk on fire")

    with ReadAhead(broken_reader(), bound=8) as items:
        assert [next(items), next(items)] == [1, 2]
        with pytest.raises(OSError, match="disk on fire") as caught:
            next(items)
        assert "broken_reader" in [frame.name for frame in traceback.extract_tb(caught.tb)]
        assert items.ready()
        with pytest.raises(OSError, match="disk on fire"):
            next(items)


def test_an_iterable_that_cannot_start_is_an_exception_in_the_consumer() -> None:
    class Unreadable:
        def __iter__(self) -> Iterator[int]:
            raise FileNotFoundError("gone.parquet")

    with ReadAhead(Unreadable(), bound=1) as items, pytest.raises(FileNotFoundError, match="gone.parquet"):
        next(items)


def test_close_ends_a_thread_that_waits_for_room_and_closes_the_iterable_there() -> None:
    counter = Counter(1000)
    items = ReadAhead(counter, bound=2)
    assert eventually(lambda: counter.made == 3)
    start = time.monotonic()
    items.close()
    assert time.monotonic() - start < 2
    assert counter.closed_in == "prefetch"
    assert not any(thread is items._thread for thread in threading.enumerate())
    assert list(items) == []
    items.close()


def test_close_wakes_a_consumer_that_waits() -> None:
    held = threading.Event()

    def stuck() -> Iterator[int]:
        held.wait(10)
        yield 1

    items = ReadAhead(stuck(), bound=1)
    seen: list[list[int]] = []
    consumer = threading.Thread(target=lambda: seen.append(list(items)))
    consumer.start()
    closer = threading.Thread(target=items.close)
    closer.start()
    consumer.join(5)
    assert seen == [[]]
    held.set()
    closer.join(5)
    assert not closer.is_alive()


def test_the_thread_does_not_outlive_a_consumer_that_fails() -> None:
    with pytest.raises(ZeroDivisionError), ReadAhead(Counter(1000), bound=2) as items:
        thread = items._thread
        raise ZeroDivisionError
    assert thread.daemon
    assert not thread.is_alive()


def test_waiting_costs_no_processor_time() -> None:
    held = threading.Event()

    def slow() -> Iterator[int]:
        held.wait(0.5)
        yield 1

    with ReadAhead(slow(), bound=1) as items:
        before = time.process_time()
        assert next(items) == 1
        assert time.process_time() - before < 0.25
