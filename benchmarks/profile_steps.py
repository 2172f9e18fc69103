"""Where a decode step's time goes on the GPU: kernels by name, summed per step.

    python benchmarks/profile_steps.py [--rows 32] [--context 384] [--temperature 0]

Llama-3.1-8B shape, random weights, bf16. Profiles some steps in the middle of a run of equal rows.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import pipeline
from pipeline.bench.workloads import RowLength, make_requests
from pipeline.config import EngineConfig, LoadFormat, ModelConfig
from pipeline.engine import Engine
from pipeline.models.load import load_model, wrap_model
from pipeline.request import SamplingParams

_PROFILED_STEPS = 20
_NEW_TOKENS = 200
_SHAPE = Path(pipeline.__file__).parent / "assets" / "llama-8b"


def profiled(
    model: Any, rows: int, context: int, temperature: float, skipped: int, batched: int
) -> tuple[Counter[str], Counter[str]]:
    """Microseconds and launches by kernel, over _PROFILED_STEPS steps."""
    wrapped = wrap_model(model, max_model_len=context + 256)
    engine = Engine(wrapped, EngineConfig(max_num_seqs=rows, max_num_batched_tokens=batched))
    recorder = profile(activities=[ProfilerActivity.CUDA])
    steps = 0

    def tick() -> bool:
        nonlocal steps
        steps += engine.stats.counters.num_steps > skipped
        if steps == 10:
            torch.cuda.synchronize()
            recorder.start()
        if steps == 10 + _PROFILED_STEPS:
            torch.cuda.synchronize()
            recorder.stop()
        return steps > 10 + _PROFILED_STEPS

    sampling = SamplingParams(temperature=temperature, ignore_eos=True)
    lengths = [RowLength(context, _NEW_TOKENS)] * rows
    for _ in engine.generate(make_requests(lengths, wrapped.vocab_size, sampling, 0), tick):
        pass
    time_of: Counter[str] = Counter()
    count_of: Counter[str] = Counter()
    for event in recorder.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            time_of[event.name] += event.device_time
            count_of[event.name] += 1
    return time_of, count_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prefill", action="store_true", help="profile prompts of --context tokens instead")
    arguments = parser.parse_args()
    model = load_model(ModelConfig(path=str(_SHAPE), load_format=LoadFormat.dummy)).model
    for rows in arguments.rows or [32]:
        # Steps 10 to 30 of a run of long prompts are all prefill; of the others, steps that decode.
        skipped, batched = (0 if arguments.prefill else 60), 8192
        time_of, count_of = profiled(model, rows, arguments.context, arguments.temperature, skipped, batched)
        print(f"{rows} rows of about {arguments.context + 80} tokens; us and launches per step:")
        for name, micros in time_of.most_common(16):
            print(f"{micros / _PROFILED_STEPS:9.0f} {count_of[name] / _PROFILED_STEPS:7.1f}  {name[:95]}")
        print(f"{sum(time_of.values()) / _PROFILED_STEPS:9.0f}  in all", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
