"""Workloads A, B and C on one GPU: random weights in the shape of Llama-3.1-8B, in bf16.

    python benchmarks/workloads.py [--check] [--workload B] [--mode async] [--rows 32] ...

--check first compares the GPU engine's greedy tokens with the CPU's on the shipped model, in every
combination of mode, graphs and fused layers. Prints a short table last and writes JSON to $OUT (or
the current folder).

A: 32 rows, 128-token prompts, 8,192 new tokens each. B: the same with 512 new tokens. C: 1,024 rows
of the lengths in workload_mix.json ([prompt, new tokens] a row).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import pipeline
from pipeline.config import Device, Dtype, EngineConfig, EngineMode
from pipeline.engine import Engine, Request, RowKey, SamplingParams
from pipeline.models.load import wrap_model

_ASSETS = Path(pipeline.__file__).parent / "assets"
_MIX = Path(__file__).parent / "workload_mix.json"


def llama_8b() -> Any:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)


def lengths_of(workload: str, rows: int) -> list[tuple[int, int]]:
    if workload == "C":
        return [(int(p), int(n)) for p, n in json.loads(_MIX.read_text())]
    return [(128, {"A": 8192, "B": 512}[workload])] * rows


def requests_of(lengths: list[tuple[int, int]], temperature: float, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    made = []
    for row, (prompt, new) in enumerate(lengths):
        params = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True)
        made.append(Request(RowKey(0, row), rng.integers(10, 120000, prompt).astype(np.int32), params))
    return made


def run(engine: Engine, lengths: list[tuple[int, int]], temperature: float, seed: int) -> dict[str, float]:
    before = engine.stats
    torch.cuda.synchronize()
    started = time.perf_counter()
    tokens = sum(len(c.token_ids) for c in engine.generate(requests_of(lengths, temperature, seed)))
    seconds = time.perf_counter() - started
    after = engine.stats
    steps = after.counters.num_steps - before.counters.num_steps
    busy = after.busy_seconds - before.busy_seconds
    spent = {} if engine._cuda is None else engine._cuda.spent
    print("  device time by padded rows:", {k: (n, round(s, 3)) for k, (n, s) in spent.items()}, flush=True)
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "steps": steps,
        "ms_per_step": 1e3 * seconds / steps,
        "busy_share": busy / seconds,
    }


def check() -> dict[str, str]:
    """Greedy and drawn tokens of the shipped model on the GPU, float32, against the CPU engine's."""
    import pyarrow.parquet as pq

    texts = pq.read_table(_ASSETS / "demo_prompts.parquet", columns=["prompt"])["prompt"].to_pylist()

    def outputs(device: Device, temperature: float, **config: Any) -> dict[int, list[int]]:
        engine = Engine.from_pretrained(
            str(_ASSETS / "tiny-model"),
            EngineConfig(**config),
            device=device,
            dtype=Dtype.float32,
        )
        tokenizer = engine.loaded.tokenizer
        requests = [
            Request(
                RowKey(0, i),
                np.array(tokenizer(f"<|user|>{t}<|end|><|assistant|>")["input_ids"], np.int32),
                SamplingParams(temperature=temperature, max_tokens=96),
            )
            for i, t in enumerate(texts)
        ]
        return {c.request.key.row: c.token_ids.tolist() for c in engine.generate(requests)}

    results = {}
    for temperature in (0.0, 1.0):
        expected = outputs(Device.cpu, temperature)
        for mode in EngineMode:
            for graphs in (False, True):
                for fused in (False, True):
                    got = outputs(Device.cuda, temperature, mode=mode, cuda_graphs=graphs, fused=fused)
                    same = sum(got[row] == expected[row] for row in expected)
                    name = f"T={temperature:g} {mode.value} graphs={graphs} fused={fused}"
                    results[name] = f"{same} of {len(expected)} rows equal the CPU's"
                    print(name, results[name], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--workload", action="append", choices=["A", "B", "C"], default=[])
    parser.add_argument("--mode", action="append", choices=["sync", "async"], default=[])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-num-seqs", type=int, default=0)
    parser.add_argument("--batched-tokens", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--not-fused", action="store_true")
    parser.add_argument("--fifo", action="store_true", help="admit in order of arrival")
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "arguments": vars(arguments),
    }
    if arguments.check:
        report["check"] = check()
    lines = []
    model = llama_8b() if arguments.workload else None
    for workload in arguments.workload:
        lengths = lengths_of(workload, arguments.rows)
        longest = max(p + n for p, n in lengths) + 16
        for mode in arguments.mode or ["async"]:
            started = time.perf_counter()
            engine = Engine(
                wrap_model(model, max_model_len=longest),
                EngineConfig(
                    mode=EngineMode(mode),
                    max_num_seqs=arguments.max_num_seqs or min(len(lengths), 512),
                    max_num_batched_tokens=arguments.batched_tokens,
                    cuda_graphs=not arguments.eager,
                    fused=not arguments.not_fused,
                    longest_first=not arguments.fifo,
                ),
            )
            start_up = time.perf_counter() - started
            run(engine, [(p, min(n, 16)) for p, n in lengths][:64], arguments.temperature, 99)
            runs = [run(engine, lengths, arguments.temperature, i) for i in range(arguments.repetitions)]
            middle = sorted(runs, key=lambda r: r["seconds"])[len(runs) // 2]
            spread = [r["seconds"] for r in runs]
            report[f"{workload} {mode}"] = {"median": middle, "runs": runs, "start_up_s": start_up}
            lines.append(
                f"{workload} {mode:<5} {middle['ms_per_step']:7.3f} ms/step "
                f"{middle['tokens_per_s']:9,.0f} tokens/s, busy {middle['busy_share']:.1%}, "
                f"{statistics.median(spread):.2f} s ({min(spread):.2f} to {max(spread):.2f}), "
                f"{middle['steps']} steps, start-up {start_up:.1f} s"
            )
            print(lines[-1], flush=True)
            del engine
            torch.cuda.empty_cache()
    out = Path(os.environ.get("OUT", ".")) / "workloads.json"
    out.write_text(json.dumps(report, indent=1))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
