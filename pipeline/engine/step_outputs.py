"""One step's results in one piece of memory: written on the device, copied to the host at once.

Knows shapes and offsets; refuses to know streams.

Shapes: N = sampled rows, K = alternatives per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from pipeline.engine.model_runner import StepOutput
from pipeline.engine.sampler import Sampled


@dataclass(frozen=True)
class OutputLayout:
    """Where each result of num_rows sampled rows begins. All are of 32 bits."""

    num_rows: int
    records: bool
    num_topk: int

    @property
    def num_words(self) -> int:
        return self.num_rows * (1 + self.records + 2 * self.num_topk)

    def write(self, buffer: torch.Tensor, sampled: Sampled) -> None:
        """buffer: int32 [>= num_words]; sampled: of num_rows rows."""
        n = self.num_rows
        buffer[:n].copy_(sampled.ids)
        if self.records:
            assert sampled.logprobs is not None
            buffer[n : 2 * n].view(torch.float32).copy_(sampled.logprobs)
        if self.num_topk:
            assert sampled.topk_ids is not None and sampled.topk_logprobs is not None
            ids, logprobs = buffer[2 * n : self.num_words].view(2, n, self.num_topk)
            ids.copy_(sampled.topk_ids)
            logprobs.view(torch.float32).copy_(sampled.topk_logprobs)

    def read(self, buffer: np.ndarray, count: int) -> StepOutput:
        """buffer: int32 [>= num_words]. The first `count` rows, as arrays of their own."""
        n = self.num_rows
        topk_ids = topk_logprobs = None
        if self.num_topk:
            ids, logprobs = buffer[2 * n : self.num_words].reshape(2, n, self.num_topk)
            topk_ids, topk_logprobs = ids[:count].copy(), logprobs[:count].view(np.float32).copy()
        return StepOutput(
            buffer[:count].copy(),
            buffer[n : n + count].view(np.float32).copy() if self.records else None,
            topk_ids,
            topk_logprobs,
        )


@lru_cache(maxsize=256)
def output_layout(num_rows: int, records: bool, num_topk: int) -> OutputLayout:
    return OutputLayout(num_rows, records, num_topk)
