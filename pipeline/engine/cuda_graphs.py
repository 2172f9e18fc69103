"""CUDA graphs of whole steps, in one pool of memory.

Knows capture and replay; refuses to know what a step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch


class StepEnd(Enum):
    """Where a graph ends: with the sampled ids, or at the logits."""

    SAMPLED = "sampled"
    LOGITS = "logits"


class GraphKey(NamedTuple):
    """Which graph. made: its inputs are made on the device, for `size` decoding rows; else the host sends
    them, of `size` tokens, prompts among them."""

    made: bool
    size: int
    end: StepEnd


class StepGraphs:
    """What was captured. Whoever captures the largest step first has one pool that serves all."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, Any] = {}
        self._pool: Any = None

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def capture(self, key: GraphKey, compute: Callable[[], None], stream: torch.cuda.Stream) -> None:
        """compute: enqueues the step, and has done so once before. Nothing else may run on the device."""
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            compute()
        self._pool = graph.pool()
        self._graphs[key] = graph

    def replay(self, key: GraphKey) -> None:
        """Enqueue the step on the current stream."""
        self._graphs[key].replay()

    def clear(self) -> None:
        """Let go of all graphs and of their memory."""
        self._graphs.clear()
        self._pool = None
