"""What changes the logits before anything is drawn: bias, penalties, words and stops not allowed.

In the order of transformers' generate: logit bias, repetition penalty, then vLLM's presence and
frequency penalties, bad words, min_tokens. Only rows that ask for one of them are touched. Ids that
the model has no logits for (a tokenizer may know more) come to nothing. Otherwise than in
transformers, a bad word that is a stop id is forbidden as any other is. Knows tensors; refuses to
know sequences and draws.

Shapes: N = sampled rows, V = vocabulary, H = rows with a history, L = tokens of the longest.
"""

from __future__ import annotations

import numpy as np
import torch

from pipeline.engine.sampling_inputs import BadWords, HistoryInputs, SamplingInputs
from pipeline.engine.sequence import NO_TOKEN


def process_logits(
    logits: torch.Tensor, inputs: SamplingInputs, last_ids: torch.Tensor | None
) -> torch.Tensor:
    """logits [N, V] float, last_ids int64 [N], each row's newest token -> logits [N, V].

    The argument is left as it is; with nothing to do it is returned itself.
    """
    if inputs.history is None and inputs.bias is None and inputs.bad_words is None:
        return _forbid(logits, inputs.forbidden) if len(inputs.forbidden) else logits
    logits = logits.clone()
    device = logits.device
    if inputs.bias is not None:
        there = inputs.bias.ids < logits.shape[1]
        rows, ids, values = (
            torch.from_numpy(a[there]).to(device)
            for a in (inputs.bias.rows, inputs.bias.ids, inputs.bias.values)
        )
        logits.index_put_((rows, ids), values, accumulate=True)
    tokens = None
    if inputs.history is not None:
        assert last_ids is not None, "rows with a history need their newest tokens"
        tokens = _with_last(inputs.history, last_ids)
        rows = torch.from_numpy(inputs.history.rows).to(device)
        logits[rows] = _penalise(logits[rows], tokens, inputs.history)
    if inputs.bad_words is not None:
        _forbid_words(logits, inputs.bad_words, inputs.history, tokens)
    return _forbid(logits, inputs.forbidden)


def _with_last(history: HistoryInputs, last_ids: torch.Tensor) -> torch.Tensor:
    """Each row's tokens with the newest behind them: int64 [H, L + 1]."""
    device = last_ids.device
    tokens = torch.from_numpy(np.pad(history.tokens, ((0, 0), (0, 1)))).to(device)
    rows, ends = (torch.from_numpy(a).to(device) for a in (history.rows, history.num_tokens))
    tokens.scatter_(1, ends[:, None], last_ids[rows][:, None])
    return tokens


def _penalise(logits: torch.Tensor, tokens: torch.Tensor, history: HistoryInputs) -> torch.Tensor:
    device = logits.device
    place = torch.arange(tokens.shape[1], device=device)[None]
    num_tokens, num_prompt, repetition, presence, frequency = (
        torch.from_numpy(a).to(device)[:, None]
        for a in (
            history.num_tokens,
            history.num_prompt,
            history.repetition,
            history.presence,
            history.frequency,
        )
    )
    known = place <= num_tokens
    seen = torch.zeros_like(logits).scatter_add_(1, tokens, known.to(logits.dtype)) > 0
    generated = (known & (place >= num_prompt)).to(logits.dtype)
    counts = torch.zeros_like(logits).scatter_add_(1, tokens, generated)
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - frequency * counts - presence * (counts > 0)


def _forbid_words(
    logits: torch.Tensor, words: BadWords, history: HistoryInputs | None, tokens: torch.Tensor | None
) -> None:
    """Mask, in place, the last id of every word whose other ids are the row's newest tokens."""
    device = logits.device
    rows, ids = torch.from_numpy(words.rows).to(device), torch.from_numpy(words.ids).to(device)
    complete = ids[:, -1] < logits.shape[1]
    if ids.shape[1] > 1:
        assert history is not None and tokens is not None
        of_history = torch.from_numpy(words.history_rows).to(device)
        ends = torch.from_numpy(history.num_tokens).to(device)[of_history] + 1
        places = ends[:, None] + torch.arange(1 - ids.shape[1], 0, device=device)
        tail = tokens[of_history[:, None], places.clamp(min=0)]
        matches = (ids[:, :-1] == NO_TOKEN) | ((ids[:, :-1] == tail) & (places >= 0))
        complete &= matches.all(dim=1)
    logits[rows[complete], ids[complete, -1]] = -torch.inf


def _forbid(logits: torch.Tensor, pairs: np.ndarray) -> torch.Tensor:
    pairs = pairs[pairs[:, 1] < logits.shape[1]]
    if not len(pairs):
        return logits
    logits = logits.clone()
    rows, ids = torch.from_numpy(pairs.T).to(logits.device)
    logits[rows, ids] = -torch.inf
    return logits
