"""The sampling values that apply to a job, and where each came from.

A value set in the job's configuration wins; then, under `sampling.defaults: model`, the model's
own generation configuration; then the neutral value. Knows settings; refuses to know tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.config import JobConfig, SamplingConfig, SamplingDefaults
from pipeline.report.summary import ResolvedValue
from pipeline.request import SamplingParams

# What leaves the model's distribution as it is.
_NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": 0.0}
_MODEL = "the model's generation_config"
_JOB = "the job's configuration"


def resolve_sampling(
    config: JobConfig, generation_config: Any, tokenizer: Any, eos_ids: Sequence[int]
) -> tuple[SamplingParams, list[ResolvedValue]]:
    """One SamplingParams for all rows, and each value with its origin, as `sampling.<name>`.

    generation_config: transformers' (None if the model has none). Raises ValueError for values out
    of range, naming the key.
    """
    s = config.sampling
    values = {name: _filter_value(name, s, generation_config) for name in _NEUTRAL}
    stop, special = _split_stops(s.stop, tokenizer)
    params = SamplingParams(
        **{name: value for name, (value, _) in values.items()},
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        stop=stop,
        stop_token_ids=(*s.stop_token_ids, *special),
        ignore_eos=s.ignore_eos,
        n=s.n,
        logprobs=config.output.logprobs,
        top_logprobs=config.output.topk,
    )
    resolved = [ResolvedValue(f"sampling.{name}", *values[name]) for name in _NEUTRAL]
    resolved += [
        ResolvedValue(f"sampling.{name}", getattr(s, name), _JOB)
        for name in ("max_tokens", "min_tokens", "stop", "n")
    ]
    ends = sorted({*params.stop_token_ids, *(() if s.ignore_eos else eos_ids)})
    origin = _JOB if s.ignore_eos else f"{_MODEL}, its tokenizer and {_JOB}"
    return params, [*resolved, ResolvedValue("sampling.stop_token_ids", ends, origin)]


def _filter_value(name: str, config: SamplingConfig, generation_config: Any) -> tuple[Any, str]:
    chosen = getattr(config, name)
    if chosen is not None:
        return chosen, _JOB
    if config.defaults is SamplingDefaults.none or generation_config is None:
        return _NEUTRAL[name], "the neutral value"
    sampled = getattr(generation_config, "do_sample", None)
    if name == "temperature" and not sampled:
        # transformers generates greedily unless the model says otherwise.
        return 0.0, f"{_MODEL}: do_sample is {str(bool(sampled)).lower()}"
    value = getattr(generation_config, name, None)
    # 0 switches top-k off in some published configurations.
    if value is None or (name == "top_k" and value == 0):
        return _NEUTRAL[name], "the neutral value"
    return value, _MODEL


def _split_stops(stop: Sequence[str], tokenizer: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop strings that are one special token become stop ids: such tokens never show in the text."""
    special = {
        token: tokenizer.convert_tokens_to_ids(token)
        for token in stop
        if token in getattr(tokenizer, "all_special_tokens", ())
    }
    return tuple(s for s in stop if s not in special), tuple(special.values())
