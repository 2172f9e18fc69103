"""From logits to tokens: greedy or drawn, and what was likely beside them.

Order, as in transformers' logits processors: bias, penalties and forbidden ids
(`logit_processors.py`), temperature, top-k, top-p, min-p. The draw is the inverse of the
cumulative distribution in id order: the first id whose cumulative weight (float64) exceeds
uniform x total. Ties go to the lowest id, except that top-k keeps all ids equal to the k-th, as
transformers does. Log-probabilities are those of the model's own distribution: before any of the
above, after the padding of the vocabulary is masked.

Knows tensors; refuses to know sequences. Every row is computed by itself, so a row's token does
not depend on its neighbours.

Shapes: N = sampled rows, V = ids the model has logits for, K = alternatives per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.logit_processors import process_logits
from pipeline.engine.sampling_inputs import SamplingInputs

# Ids looked at before a full sort is paid for: nearly always enough for top-p.
_SHORTLIST = 1024


@dataclass(frozen=True)
class Sampled:
    """ids: int64 [N]. logprobs float32 [N], topk_ids int64 [N, K], topk_logprobs float32 [N, K], or None."""

    ids: torch.Tensor
    logprobs: torch.Tensor | None = None
    topk_ids: torch.Tensor | None = None
    topk_logprobs: torch.Tensor | None = None


class Sampler:
    """vocab_size: ids of the tokenizer; logits at or above it belong to padding and are masked.

    logprobs, num_topk: what to record for every row.
    """

    def __init__(self, vocab_size: int, *, logprobs: bool = False, num_topk: int = 0) -> None:
        self._vocab_size = vocab_size
        self._logprobs = logprobs or num_topk > 0
        self._num_topk = num_topk

    @property
    def records(self) -> bool:
        """Whether log-probabilities are recorded for every row."""
        return self._logprobs

    def __call__(
        self, logits: torch.Tensor, inputs: SamplingInputs, last_ids: torch.Tensor | None = None
    ) -> Sampled:
        """logits [N, V] of any float type -> one id per row.

        last_ids: int64 [N], each row's newest token; needed where inputs.history is there.
        """
        logits = logits.float()
        if logits.shape[1] > self._vocab_size:
            logits = logits.clone()
            logits[:, self._vocab_size :] = -torch.inf
        distribution = torch.log_softmax(logits, dim=-1) if self._logprobs else None
        logits = process_logits(logits, inputs, last_ids)
        chosen = logits.argmax(dim=-1)
        drawn = (inputs.temperature > 0).nonzero()[0]
        if len(drawn):
            rows = torch.from_numpy(drawn).to(logits.device)
            chosen[rows] = _draw(logits[rows], *_row_parameters(inputs, drawn, logits.device))
        return self._record(chosen, distribution)

    def _record(self, chosen: torch.Tensor, distribution: torch.Tensor | None) -> Sampled:
        if distribution is None:
            return Sampled(chosen)
        logprobs = distribution.gather(1, chosen[:, None])[:, 0]
        if not self._num_topk:
            return Sampled(chosen, logprobs)
        values, ids = _largest(distribution, self._num_topk)
        return Sampled(chosen, logprobs, ids, values)


def _row_parameters(
    inputs: SamplingInputs, rows: np.ndarray, device: torch.device
) -> tuple[torch.Tensor, ...]:
    names = ("temperature", "top_k", "top_p", "min_p", "uniform")
    return tuple(torch.from_numpy(getattr(inputs, name)[rows]).to(device) for name in names)


def _draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """logits [N, V]; the rest [N] -> ids [N]."""
    # The largest is taken off first: it stays 0 however small the temperature, where x / T overflows.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature[:, None]
    logits = filter_logits(logits, top_k, top_p, min_p)
    weights = (logits - logits.max(dim=-1, keepdim=True).values).exp()
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    # uniform x total may round up to the total itself: then it is the last id of any weight.
    last = weights.shape[1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(ids, last)


def filter_logits(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Mask with -inf what top-k (0: off), then top-p (1: off), then min-p (0: off) leave out.

    logits [N, V]; the rest [N]. Rows that use no filter are not touched.
    """
    rows = ((top_k > 0) | (top_p < 1)).nonzero()[:, 0]
    if len(rows):
        logits = logits.clone()
        logits[rows] = _keep_likeliest(logits[rows], top_k[rows], top_p[rows])
    if bool((min_p > 0).any()):
        floor = logits.max(dim=-1, keepdim=True).values + min_p.log()[:, None]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits


def _keep_likeliest(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    vocab = logits.shape[1]
    if bool((top_k > 0).any()):
        k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()
        values = logits.topk(int(k[top_k > 0].max()), dim=-1).values
        kth = values.gather(1, (k - 1).clamp(max=values.shape[1] - 1)[:, None])
        logits = logits.masked_fill((logits < kth) & (top_k > 0)[:, None], -torch.inf)
    rows = (top_p < 1).nonzero()[:, 0]
    if len(rows):
        logits = logits.clone()
        logits[rows] = _nucleus(logits[rows], top_p[rows])
    return logits


def _nucleus(logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the smallest set of likeliest ids whose probability reaches top_p, the lowest of equals first."""
    highest = logits.max(dim=-1, keepdim=True).values
    # cumsum, not sum: it adds in the same order whatever the number of rows.
    total = (logits - highest).exp().cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    wanted = top_p[:, None].double() * total
    values = logits.topk(min(logits.shape[1], _SHORTLIST), dim=-1).values
    reached = (values - highest).exp().cumsum(dim=-1, dtype=torch.float64)
    if bool((reached[:, -1:] < wanted).any()):
        values = logits.sort(dim=-1, descending=True).values
        reached = (values - highest).exp().cumsum(dim=-1, dtype=torch.float64)
    num_kept = (reached < wanted).sum(dim=-1, keepdim=True).clamp(max=values.shape[1] - 1) + 1
    least = values.gather(1, num_kept - 1)
    above, equal = logits > least, logits == least
    room = num_kept - above.sum(dim=-1, keepdim=True)
    return logits.masked_fill(~(above | (equal & (equal.cumsum(dim=-1) <= room))), -torch.inf)


def _largest(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The count largest of each row, equals in id order: values [N, V] -> values and ids [N, count]."""
    top = values.topk(count, dim=-1)
    ids, least = top.indices.sort(dim=-1).values, top.values[:, -1:]
    equal = values == least
    room = count - (top.values > least).sum(dim=-1)
    # torch.topk takes any of those equal to the last; rows that leave some out get the lowest of them.
    rows = (equal.sum(dim=-1) > room).nonzero()[:, 0]
    if len(rows):
        first_equal = equal[rows] & (equal[rows].cumsum(dim=-1) <= room[rows, None])
        ids[rows] = ((values[rows] > least[rows]) | first_equal).nonzero()[:, 1].view(-1, count)
    ordered, order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered, ids.gather(1, order)
