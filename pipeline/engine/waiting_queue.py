"""Sequences that wait for admission, in the order in which they will be let in.

First come, first served; or, of those there are, the one that may become longest first: a batch
that starts its long rows early does not end with a few of them running alone. Whoever was
preempted goes before all others. Knows an order; refuses to know memory and slots. Each operation
costs the same however many wait (or grows with its logarithm).
"""

from __future__ import annotations

import heapq
from collections import deque

from pipeline.engine.sequence import Sequence


class WaitingQueue:
    def __init__(self, longest_first: bool = False) -> None:
        self._longest_first = longest_first
        self._returned: deque[Sequence] = deque()
        # (minus the tokens it may still generate, arrival, sequence); all zero in front when FIFO.
        self._heap: list[tuple[int, int, Sequence]] = []
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._returned) + len(self._heap)

    def add(self, sequence: Sequence) -> None:
        self._arrivals += 1
        length = sequence.limit - len(sequence.tokens) if self._longest_first else 0
        heapq.heappush(self._heap, (-length, self._arrivals, sequence))

    def put_back(self, sequence: Sequence) -> None:
        """A preempted sequence; the last one put back is the first to go on."""
        self._returned.appendleft(sequence)

    @property
    def first(self) -> Sequence:
        return self._returned[0] if self._returned else self._heap[0][2]

    def pop(self) -> Sequence:
        return self._returned.popleft() if self._returned else heapq.heappop(self._heap)[2]

    def clear(self) -> None:
        self._returned.clear()
        self._heap.clear()
