"""Workloads A, B and C: how many rows, how long their prompts, how many tokens each generates.

A: 32 rows, 128-token prompts, 8,192 new tokens each: long generations, where the host's time shows.
B: the same with 512 new tokens. C: 1,024 rows of the log-normal lengths in assets/workload_mix.json,
[prompt, new tokens] a row. Prompts are random ids, and every row runs to its full length.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.config import BenchConfig, OutputConfig, SamplingConfig, Workload
from pipeline.request import Request, RowKey, SamplingParams

_MIX = Path(__file__).resolve().parent.parent / "assets" / "workload_mix.json"
_ROWS, _PROMPT_TOKENS = 32, 128
_NEW_TOKENS = {Workload.A: 8192, Workload.B: 512}
# Sampling keys that change what a step costs; the others decide when a row ends, which is fixed here.
_MEASURED = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_IGNORED = ("defaults", "max_tokens", "ignore_eos")


class RowLength(NamedTuple):
    """Tokens of a row."""

    prompt: int
    new: int


def row_lengths(bench: BenchConfig) -> list[RowLength]:
    """The workload's rows, as many and as long as the configuration says; more than C has go round again."""
    assert bench.workload is not None
    if bench.workload is Workload.C:
        mix = [RowLength(*row) for row in json.loads(_MIX.read_text(encoding="utf-8"))]
        rows = [mix[i % len(mix)] for i in range(bench.rows or len(mix))]
    else:
        rows = [RowLength(_PROMPT_TOKENS, _NEW_TOKENS[bench.workload])] * (bench.rows or _ROWS)
    if bench.new_tokens is None:
        return rows
    return [row._replace(new=bench.new_tokens) for row in rows]


def sampling_of(sampling: SamplingConfig, output: OutputConfig) -> SamplingParams:
    """What all rows share; greedy where no temperature is given. ValueError for a key without effect here."""
    neutral = SamplingConfig()
    for field in fields(sampling):
        value = getattr(sampling, field.name)
        if field.name not in (*_MEASURED, *_IGNORED) and value != getattr(neutral, field.name):
            raise ValueError(
                f"sampling.{field.name}={value} has no place in a benchmark, whose rows all run to a fixed "
                "length: leave it out"
            )
    given = {name: getattr(sampling, name) for name in _MEASURED}
    given = {"temperature": 0.0} | {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**given, ignore_eos=True, logprobs=output.logprobs, top_logprobs=output.topk)


def make_requests(
    rows: list[RowLength], vocab_size: int, sampling: SamplingParams, seed: int
) -> list[Request]:
    """Rows of random ids; another seed makes others, so that no run finds the prefixes of the one before."""
    rng = np.random.default_rng(seed)
    return [
        Request(
            RowKey(0, i),
            rng.integers(vocab_size, size=row.prompt, dtype=np.int32),
            replace(sampling, max_tokens=row.new),
        )
        for i, row in enumerate(rows)
    ]
