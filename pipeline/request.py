"""The values that travel: a request in, completions out.

Knows: what a row asks of the engine and what it gets back.
Refuses to know: files, tokenizers, tensors. Imports nothing of ours, so every room may import it.

Shapes: P = prompt tokens, C = completion tokens, K = alternatives per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np


class RowKey(NamedTuple):
    """Names a row for ever: the index of its file in the input and its row in that file."""

    file: int
    row: int


class FinishReason(str, Enum):
    """How a row ended; the values are those of the output column `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class RowError:
    """Why a row has no completion: a stable code for machines, a message for people."""

    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(frozen=True)
class Refusal:
    """A row that ends before the engine: `finish_reason` is ERROR (with an error) or SKIPPED."""

    finish_reason: FinishReason
    error: RowError | None = None


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled. Immutable, shared between requests.

    temperature: 0 means greedy; otherwise logits are divided by it.
    top_k: keep the k most likely ids, None keeps all. top_p: keep the smallest set whose
    probability reaches p. min_p: keep ids at least min_p times as likely as the likeliest.
    max_tokens: most completion tokens, a stop token included. min_tokens: completion tokens before
    a stop may come.
    stop: strings that end the text (cut before it). stop_token_ids: ids that end it, beside the
    model's own unless ignore_eos. n: samples per request.
    repetition_penalty: divides the positive logits of ids in prompt or completion, multiplies the
    negative ones (transformers' definition). presence_penalty, frequency_penalty: subtracted from
    the logits of ids in the completion, once, or once per occurrence (vLLM's definition).
    logit_bias: (id, number added to its logit). bad_words_ids: id sequences that must not occur.
    logprobs: record the sampled id's log-probability. top_logprobs: also the K likeliest ids.

    Raises ValueError naming the field, the value and the remedy.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0 <= self.temperature < math.inf, "use 0 for greedy or a positive number"),
            ("top_k", self.top_k is None or self.top_k >= 1, "use null to keep every token"),
            ("top_p", 0 < self.top_p <= 1, "use 1 to keep every token"),
            ("min_p", 0 <= self.min_p < 1, "use 0 to keep every token"),
            ("max_tokens", self.max_tokens >= 1, "ask for at least one token"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "keep it within max_tokens"),
            ("n", self.n >= 1, "ask for at least one sample"),
            ("top_logprobs", self.top_logprobs >= 0, "use 0 for none"),
            ("stop", all(self.stop), "remove the empty stop string"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "use 1 for none"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "use 0 for none"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "use 0 for none"),
            ("max_tokens", self.max_tokens < 2**31, "no row is that long"),
            ("top_k", self.top_k is None or self.top_k < 2**31, "use null to keep every token"),
            ("bad_words_ids", all(self.bad_words_ids), "remove the empty word"),
        )
        for name, ok, remedy in checks:
            if not ok:
                raise ValueError(f"sampling.{name}={getattr(self, name)!r} is out of range: {remedy}")

    @property
    def needs_history(self) -> bool:
        """Whether a row's logits depend on which tokens it has, beyond what the model makes of them."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or any(len(word) > 1 for word in self.bad_words_ids)


@dataclass(frozen=True)
class Request:
    """One row's question to the engine.

    prompt_ids: int32 [P]. samples: which of the row's samples to make (a resumed row asks only for
    those it lacks). payload: the caller's own, carried through untouched. refusal: set when the
    row cannot be sent; the engine then hands it straight back as completions that say so.
    """

    key: RowKey
    prompt_ids: np.ndarray
    params: SamplingParams
    samples: tuple[int, ...] = (0,)
    prompt: str | None = None
    payload: Any = None
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Completion:
    """One sample of one request, finished.

    token_ids: int32 [C], the sampled stop token included. logprobs: float32 [C] or None.
    topk_ids: int32 [C, K], topk_logprobs: float32 [C, K], or None. text: without the stop.
    """

    request: Request
    sample: int
    finish_reason: FinishReason
    token_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    text: str | None = None
    error: RowError | None = None
    logprobs: np.ndarray | None = None
    topk_ids: np.ndarray | None = None
    topk_logprobs: np.ndarray | None = None
