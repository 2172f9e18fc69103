"""Compiled against uncompiled models, and FlashAttention-3 against our prompt kernel, on a GPU:
`python benchmarks/compile_tier_a.py [--part steps] [--model gemma2]`.

Models that the fused walk does not know, with random weights of a real configuration in bfloat16.
Parts: `logits` (how far compiled is from uncompiled), `start` (seconds until a step can run, on an empty
and on a filled compile cache, and for eight processes at once on an empty one), `steps` (ms per decode step
at 32 and 256 rows inside the engine; the difference of two runs of different length, so that prompts and
start-up drop out), `prompts` (prompt chunks over the paged cache, and which builds and pages of
FlashAttention-3 are taken). A part that fails says so and leaves the others alone. Results go to
$OUT/compile_tier_a.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.config import EngineConfig  # noqa: E402
from pipeline.engine import Engine, Request, RowKey, SamplingParams  # noqa: E402
from pipeline.kernels.flash_attention import flash_package, flash_prefill, why_not_flash  # noqa: E402
from pipeline.kernels.paged_prefill import paged_prefill  # noqa: E402
from pipeline.models.compiled import largest_difference  # noqa: E402
from pipeline.models.forward import make_forward  # noqa: E402
from pipeline.models.load import LoadedModel, wrap_model  # noqa: E402

DTYPE, BLOCK_SIZE, MAX_MODEL_LEN = torch.bfloat16, 32, 1024
PROCESSES = 8
PROMPT, SHORT, LONG = 128, 64, 192
ROWS = (32, 256)
_NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CONFIGS = {
    "gemma2": lambda: Gemma2Config(
        vocab_size=256000, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, **_NO_IDS,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=32, num_experts_per_tok=4,
        moe_intermediate_size=768, max_position_embeddings=32768, **_NO_IDS,
    ),
}  # fmt: skip
# Llama-3.1-8B's attention. Chunks: (context before, new tokens) of each row.
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CHUNKS = {
    "8 x 2,048": [(0, 2048)] * 8,
    "16 x 256": [(0, 256)] * 16,
    "2,048 behind 6,144": [(6144, 2048)],
    "4 x 512 behind 512 to 4,096": [(512, 512), (1024, 512), (2048, 512), (4096, 512)],
}
PAGES = (32, 64, 128, 256)


def load(name: str) -> LoadedModel:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=DTYPE)
    return wrap_model(model.eval().requires_grad_(False), max_model_len=MAX_MODEL_LEN)


# ------------------------------------------------------------------------ models


def logits(name: str) -> dict[str, Any]:
    loaded = load(name)
    step, words = make_forward(loaded, compiled=True, block_size=BLOCK_SIZE)
    eager, _ = make_forward(loaded, compiled=False, block_size=BLOCK_SIZE)
    off = largest_difference(loaded, BLOCK_SIZE, step, eager, {})
    print(f"{name}: {words}; compiled logits are {off:.2%} of the largest off the uncompiled", flush=True)
    return {"words": words, "difference": off}


def start_one(name: str) -> None:
    """What a process of its own does in the part `start`: prints seconds as JSON."""
    began = time.perf_counter()
    loaded = load(name)
    read = time.perf_counter()
    _, words = make_forward(loaded, compiled=True, block_size=BLOCK_SIZE)
    print(json.dumps({"weights_s": read - began, "compile_s": time.perf_counter() - read, "words": words}))


def start(name: str) -> dict[str, Any]:
    def launch(folder: str) -> subprocess.Popen[str]:
        # The compile workers' Triton cache lies inside inductor's.
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
        return subprocess.Popen(
            [sys.executable, __file__, "--start-one", name],
            env={**environment, "TORCHINDUCTOR_CACHE_DIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def seconds(process: subprocess.Popen[str]) -> dict[str, Any]:
        out, said = process.communicate(timeout=400)
        if process.returncode:
            raise RuntimeError(said[-2000:])
        return json.loads(out.splitlines()[-1])

    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as shared:
        cold, warm = seconds(launch(one)), seconds(launch(one))
        together = [seconds(process) for process in [launch(shared) for _ in range(PROCESSES)]]
    each = [result["compile_s"] for result in together]
    print(
        f"{name}: compiled in {cold['compile_s']:.1f} s, {warm['compile_s']:.1f} s with a filled cache, "
        f"{min(each):.1f} to {max(each):.1f} s for {PROCESSES} at once on an empty one",
        flush=True,
    )
    return {"cold": cold, "warm": warm, "together": together}


def steps(name: str) -> dict[str, Any]:
    loaded, results = load(name), {}
    for compile_it in (False, True):
        for rows in ROWS:
            began = time.perf_counter()
            engine = Engine(
                loaded,
                EngineConfig(max_num_seqs=rows, max_num_batched_tokens=4096, compile=compile_it),
            )
            start_up = time.perf_counter() - began
            generate(engine, rows, SHORT)
            short, long = (min(generate(engine, rows, new) for _ in range(3)) for new in (SHORT, LONG))
            ms = 1e3 * (long - short) / (LONG - SHORT)
            kind = "compiled" if compile_it else "uncompiled"
            print(f"{name}, {rows} rows, {kind}: {ms:.2f} ms a step, start-up {start_up:.1f} s", flush=True)
            results[f"{rows} rows {kind}"] = {"ms_per_step": ms, "start_up_s": start_up}
            del engine
            torch.cuda.empty_cache()
    return results


def generate(engine: Engine, rows: int, new_tokens: int) -> float:
    """Seconds."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    requests = [
        Request(RowKey(0, row), rng.integers(10, 100000, PROMPT).astype(np.int32), params)
        for row in range(rows)
    ]
    torch.cuda.synchronize()
    began = time.perf_counter()
    count = sum(len(completion.token_ids) for completion in engine.generate(requests))
    assert count == rows * new_tokens
    return time.perf_counter() - began


# ------------------------------------------------------------------------ prompt chunks


def prompts() -> dict[str, Any]:
    package = flash_package()
    results: dict[str, Any] = {"package": package and package.__name__, "taken": taken(), "chunks": []}
    for (name, rows), page in ((chunk, page) for chunk in CHUNKS.items() for page in PAGES):
        results["chunks"].append({"rows": name, "page": page, **time_chunks(rows, page)})
        one = results["chunks"][-1]
        flash = f"{one['flash_us']:8.1f} us" if one["flash_us"] else f"({one['why_not_flash']})"
        print(f"{name:<28} page {page:>3}: triton {one['triton_us']:8.1f} us, flash {flash}", flush=True)
    return results


def taken() -> dict[str, str | None]:
    """What stands against FlashAttention-3, for heads, pages and options; null if it is taken."""
    found = {}
    for head_dim in (64, 96, 128, 256):
        for page in PAGES:
            for window, softcap in ((None, None), (4096, None), (None, 50.0)):
                reason = why_not_flash(
                    QUERY_HEADS, KV_HEADS, head_dim, page, DTYPE, torch.device("cuda"),
                    scale=head_dim**-0.5, window=window, softcap=softcap,
                )  # fmt: skip
                found[f"{head_dim} wide, page {page}, window {window}, softcap {softcap}"] = reason
    for case, reason in found.items():
        print(f"FlashAttention-3, {case}: {reason or 'taken'}", flush=True)
    return found


def time_chunks(rows: list[tuple[int, int]], page: int) -> dict[str, Any]:
    contexts = [before + new for before, new in rows]
    counts = [-(-context // page) for context in contexts]
    tables = torch.zeros((len(rows), max(counts)), dtype=torch.int32)
    numbers = (1 + torch.randperm(sum(counts), dtype=torch.int32)).split(counts)
    for row, pages in enumerate(numbers):
        tables[row, : len(pages)] = pages

    def device(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    ends = np.cumsum([0] + [new for _, new in rows]).tolist()
    query = torch.randn(ends[-1], QUERY_HEADS, HEAD_DIM, dtype=DTYPE, device="cuda")
    shape = (1 + sum(counts), KV_HEADS, page, HEAD_DIM)
    keys, values = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))
    tables, start_loc = tables.cuda(), device(ends)
    starts, lens, scale = device([before for before, _ in rows]), device(contexts), HEAD_DIM**-0.5
    out = torch.empty_like(query)

    def own() -> torch.Tensor:
        return paged_prefill(query, keys, values, tables, start_loc, starts, scale=scale, out=out)

    def flash() -> torch.Tensor:
        return flash_prefill(query, keys, values, tables, start_loc, lens, scale=scale)

    reason = why_not_flash(QUERY_HEADS, KV_HEADS, HEAD_DIM, page, DTYPE, torch.device("cuda"), scale=scale)
    if reason is None:
        off = float((flash().float() - own().float()).norm() / own().float().norm())
        assert off < 1e-2, f"the two kernels are {off:.2%} apart"
    return {
        "triton_us": median_us(own),
        "flash_us": None if reason else median_us(flash),
        "why_not_flash": reason,
    }


def median_us(call: Callable[[], object], repetitions: int = 30) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repetitions):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Launching costs the host more than short kernels take: the device is kept busy meanwhile.
        torch.cuda._sleep(1_000_000)
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3)
    return float(np.median(times))


# ------------------------------------------------------------------------ all of it


def parts(chosen: list[str], models: list[str]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for part in chosen:
        if part == "prompts":
            yield part, prompts
            continue
        measure = {"logits": logits, "start": start, "steps": steps}[part]
        for name in models:
            yield f"{part} {name}", lambda measure=measure, name=name: measure(name)


def main() -> None:
    parser = argparse.ArgumentParser()
    names = ["logits", "steps", "prompts", "start"]
    parser.add_argument("--part", action="append", choices=names, default=[])
    parser.add_argument("--model", action="append", choices=list(CONFIGS), default=[])
    parser.add_argument("--start-one", choices=list(CONFIGS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start_one:
        start_one(arguments.start_one)
        return
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    out = Path(os.environ.get("OUT", ".")) / "compile_tier_a.json"
    for name, measure in parts(arguments.part or names, arguments.model or list(CONFIGS)):
        print(f"--- {name}", flush=True)
        try:
            report[name] = measure()
        except Exception as error:  # the other parts are worth having without this one
            report[name] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        torch.cuda.empty_cache()
        out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
