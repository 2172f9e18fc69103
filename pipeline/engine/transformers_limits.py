"""What transformers' continuous batching cannot do for a job, refused by name before weights are read.

Knows settings and remedies; refuses to know models. A sampling value that is not named here as
understood is refused as soon as it differs from its default, so that none is ever dropped in silence.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from pipeline.config import SamplingConfig
from pipeline.request import SamplingParams

# One manager samples all rows alike in these ...
SHARED = ("temperature", "top_k", "top_p", "min_p", "logprobs")
# ... and takes these from each request.
_UNDERSTOOD = {*SHARED, "max_tokens", "stop_token_ids", "ignore_eos", "n"}
# Names of SamplingParams that a user types otherwise.
_KEYS = {"top_logprobs": "output.topk", "bad_words_ids": "sampling.bad_words"}
_REASONS = {
    "stop": "it ends rows at token ids only (a stop that is one special token is fine)",
    "top_logprobs": "it records the sampled token's log-probability alone",
}


def check_sampling(config: SamplingConfig, params: SamplingParams) -> None:
    """ValueError naming the first key that a job on this engine cannot have. params: as resolved."""
    if config.column is not None:
        raise ValueError(
            f"sampling.column={config.column} is not to be had with engine=transformers, which samples all "
            "rows alike: set sampling.column=null, or use engine=native"
        )
    reason = why_not(params)
    if reason is not None:
        raise ValueError(reason)


def why_not(params: SamplingParams) -> str | None:
    """Why rows cannot be sampled so, with key, value and remedy; None if they can."""
    for field in fields(params):
        value, neutral = getattr(params, field.name), _default(field)
        if field.name not in _UNDERSTOOD and value != neutral:
            key = _KEYS.get(field.name, f"sampling.{field.name}")
            reason = _REASONS.get(field.name, "it has no such step")
            return (
                f"{key}={_typed(value)} is not to be had with engine=transformers: {reason}; "
                f"set {key}={_typed(neutral)}, or use engine=native"
            )
    if params.logprobs and _reshapes(params):
        return (
            "output.logprobs=true means the model's own distribution, and engine=transformers records the "
            "one after temperature and filters: set output.logprobs=false, or sampling.temperature=0, or 1 "
            "without top_k, top_p and min_p, or use engine=native"
        )
    return None


def _reshapes(params: SamplingParams) -> bool:
    """Whether a token is drawn from another distribution than the model's."""
    if params.temperature == 0:
        return False
    return (params.temperature, params.top_k, params.top_p, params.min_p) != (1.0, None, 1.0, 0.0)


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _typed(value: Any) -> str:
    """A value as it is typed on the command line."""
    return str(list(value)) if isinstance(value, tuple) else str(value)
