"""Tokens per second beside transformers' `generate` in left-padded batches, in one run on one CPU.

    python benchmarks/cpu_generate.py [MODEL] [--prompts FILE.jsonl] [--rows 64] [--max-tokens 96]

Greedy, float32. Every variant runs once per repetition, in turn, so that a machine that slows down
slows all of them. Rows end at their stop token, as in a job; only useful tokens count. The output
must be equal, row by row, or the script fails.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import pipeline
from pipeline.config import EngineConfig, EngineMode
from pipeline.engine import Engine, Request, RowKey, SamplingParams

_ASSETS = Path(pipeline.__file__).parent / "assets"
_PADDED_BATCH = 32
Outputs = list[list[int]]


def read_prompts(path: Path, count: int) -> list[str]:
    if path.suffix == ".parquet":
        texts = pq.read_table(path, columns=["prompt"])["prompt"].to_pylist()
    else:
        texts = [json.loads(line)["prompt"] for line in path.open(encoding="utf-8")]
    return [texts[i % len(texts)] for i in range(count)]


def native(engine: Engine, prompts: Outputs, max_tokens: int) -> Outputs:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    requests = (Request(RowKey(0, i), np.array(ids, np.int32), params) for i, ids in enumerate(prompts))
    outputs: Outputs = [[] for _ in prompts]
    for completion in engine.generate(requests):
        outputs[completion.request.key.row] = completion.token_ids.tolist()
    return outputs


def padded(model: Any, tokenizer: Any, prompts: Outputs, max_tokens: int) -> Outputs:
    """Batches of the shortest prompts first: the least padding that batches of this size allow."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    outputs: Outputs = [[] for _ in prompts]
    for begin in range(0, len(order), _PADDED_BATCH):
        rows = order[begin : begin + _PADDED_BATCH]
        width = max(len(prompts[i]) for i in rows)
        ids = [[tokenizer.pad_token_id] * (width - len(prompts[i])) + prompts[i] for i in rows]
        mask = [[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in rows]
        with torch.inference_mode():
            made = model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max_tokens,
                do_sample=False,
            )
        for i, row in zip(rows, made[:, width:].tolist(), strict=True):
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            outputs[i] = row[:end]
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default=str(_ASSETS / "tiny-model"))
    parser.add_argument("--prompts", type=Path, default=_ASSETS / "demo_prompts.parquet")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for text in read_prompts(arguments.prompts, arguments.rows)
    ]
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    variants: dict[str, Callable[[], Outputs]] = {
        f"generate, left-padded batches of {_PADDED_BATCH}": lambda: padded(
            model, tokenizer, prompts, arguments.max_tokens
        )
    }
    for mode in EngineMode:
        engine = Engine.from_pretrained(arguments.model, EngineConfig(mode=mode))
        variants[f"tokenmill {mode.value}"] = lambda engine=engine: native(
            engine, prompts, arguments.max_tokens
        )
    rates: dict[str, list[float]] = {name: [] for name in variants}
    expected: Outputs | None = None
    for _ in range(arguments.repetitions):
        for name, run in variants.items():
            started = time.perf_counter()
            outputs = run()
            rates[name].append(sum(map(len, outputs)) / (time.perf_counter() - started))
            expected = expected or outputs
            if outputs != expected:
                raise SystemExit(f"{name} gives other tokens")
    assert expected is not None
    print(f"{arguments.model}: {len(prompts)} rows, {sum(map(len, expected))} tokens, equal in all variants")
    base = median(next(iter(rates.values())))
    for name, values in rates.items():
        spread = f"{min(values):,.0f} to {max(values):,.0f}"
        print(f"  {name:<38} {median(values):>8,.0f} tokens/s ({spread})  {median(values) / base:.2f} x")


if __name__ == "__main__":
    main()
