"""From logits to tokens on a GPU, without asking the host: what `sampler.py` says, through kernels.

Nothing here waits for the device, so all of it can be captured in a CUDA graph; a row's result does not
depend on the rows beside it. Knows tensors; refuses to know sequences.

Shapes: N = sampled rows, V = ids the model has logits for, K = alternatives per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pipeline.engine.logit_processors import process_logits
from pipeline.engine.sampler import Sampled
from pipeline.engine.sampling_inputs import SamplingInputs
from pipeline.kernels.sample_rows import sample_rows


class RowParameters(NamedTuple):
    """How each row is sampled, all [N]: float32 but for top_k int32 and uniform float64."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor


class CudaSampler:
    """vocab_size: ids of the tokenizer; logits at or above it belong to padding and are masked.

    logprobs, num_topk: what to record for every row.
    """

    def __init__(self, vocab_size: int, *, logprobs: bool = False, num_topk: int = 0) -> None:
        self._vocab_size = vocab_size
        self.records = logprobs or num_topk > 0
        self.num_topk = num_topk

    def __call__(self, logits: torch.Tensor, parameters: RowParameters) -> Sampled:
        """logits [N, V] -> one id per row."""
        rows = sample_rows(
            logits, self._vocab_size, *parameters, records=self.records, num_topk=self.num_topk
        )
        return Sampled(rows.ids, rows.logprobs, rows.topk_ids, rows.topk_logprobs)

    def edited(
        self,
        logits: torch.Tensor,
        parameters: RowParameters,
        inputs: SamplingInputs,
        last_ids: torch.Tensor,
    ) -> Sampled:
        """As above, with what `inputs` says of bias, penalties and forbidden ids done to the logits first.

        Recorded is the model's own distribution, before that. last_ids: int64 [N], each row's newest token.
        """
        model = logits.float()
        if model.shape[1] > self._vocab_size:
            # Padding must not win after a penalty has pushed everything else down.
            model = model.masked_fill(
                torch.arange(model.shape[1], device=model.device) >= self._vocab_size, -torch.inf
            )
        ids = sample_rows(process_logits(model, inputs, last_ids), self._vocab_size, *parameters).ids
        if not self.records:
            return Sampled(ids)
        own = self(logits, parameters)
        # Row by row in id order, as a sum over any other split would depend on the number of rows.
        highest = model.amax(dim=-1, keepdim=True)
        total = (model - highest).exp().cumsum(dim=-1, dtype=torch.float64)[:, -1:]
        logprobs = (model.gather(1, ids[:, None]) - highest).double() - total.log()
        return Sampled(ids, logprobs[:, 0].float(), own.topk_ids, own.topk_logprobs)
