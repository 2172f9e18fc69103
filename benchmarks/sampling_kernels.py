"""Times the sampling kernels beside the engine's sampler in torch: `python benchmarks/sampling_kernels.py`.

Logits as a model's, 128,256 of them: most of the probability on few ids, with a long tail. Each setting is
first held against float64: the id must be the one whose share holds the uniform number, to what rounding
allows, and the log-probabilities those of float64. Then the kernels run in a CUDA graph, torch's way runs
eagerly, both over and over on the same logits; with 32 rows these lie in L2, with more they do not. Figures
are medians of the time a call takes on the device; GB/s counts the logits once. A setting that fails prints
its traceback and is left out. Results go to $OUT/sampling_kernels.json.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.engine.sampler import _draw, _largest, filter_logits  # noqa: E402
from pipeline.kernels.sample_rows import SampledRows, sample_rows  # noqa: E402

ROWS, WIDTH, VOCABULARY = (32, 256, 512), 128_256, 128_250
DEVICE = "cuda"
CALLS_PER_GRAPH, REPEATS, WARM_UP = 10, 15, 3
# Shares of the total that two ways to add float32 weights may differ by; error of a log-probability.
SHARE_TOLERANCE, LOGPROB_TOLERANCE = 2e-6, 3e-6
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "plain, records": {"records": 1},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50, top_p 0.95, min_p 0.01": {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
    "plain, k=20": {"num_topk": 20},
    "top_p 0.95, k=20": {"top_p": 0.95, "num_topk": 20},
    "temperature 5, top_p 0.9 (no list holds it)": {"temperature": 5.0, "top_p": 0.9},
    "all equal, k=20 (no list holds it)": {"equal": 1, "num_topk": 20},
}

Result = dict[str, Any]
Parameters = dict[str, Any]


def make_case(
    num_rows: int, setting: dict[str, float], dtype: torch.dtype
) -> tuple[torch.Tensor, Parameters]:
    generator = torch.Generator(DEVICE).manual_seed(num_rows)
    logits = 2.2 * torch.randn(num_rows, WIDTH, device=DEVICE, generator=generator)
    # What a row is nearly sure of, more or less so by row.
    peaks = torch.randint(VOCABULARY, (num_rows, 8), device=DEVICE, generator=generator)
    heights = 8 + 12 * torch.rand(num_rows, 8, device=DEVICE, generator=generator)
    logits.scatter_(1, peaks, heights)
    if setting.get("equal"):
        logits.zero_()
    uniform = torch.rand(num_rows, device=DEVICE, dtype=torch.float64, generator=generator)

    def column(name: str, neutral: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), setting.get(name, neutral), device=DEVICE, dtype=dtype)

    return logits.to(dtype), {
        "temperature": column("temperature", 1.0),
        "top_k": column("top_k", 0, torch.int32),
        "top_p": column("top_p", 1.0),
        "min_p": column("min_p", 0.0),
        "uniform": uniform,
    }


def by_torch(logits: torch.Tensor, rows: Parameters, records: bool, num_topk: int) -> Result:
    """As `Sampler` does it, but for the host's part."""
    logits = logits.float()
    logits = logits.masked_fill(torch.arange(WIDTH, device=DEVICE) >= VOCABULARY, -torch.inf)
    distribution = torch.log_softmax(logits, dim=-1) if records else None
    chosen = logits.argmax(dim=-1)
    drawn = (rows["temperature"] > 0).nonzero()[:, 0]
    if len(drawn):
        chosen[drawn] = _draw(logits[drawn], *(values[drawn] for values in rows.values()))
    if distribution is None:
        return {"ids": chosen}
    result: Result = {"ids": chosen, "logprobs": distribution.gather(1, chosen[:, None])[:, 0]}
    if num_topk:
        result["values"], result["topk_ids"] = _largest(distribution, num_topk)
    return result


def check(logits: torch.Tensor, rows: Parameters, got: SampledRows, num_topk: int) -> Result:
    """Against float64, a few rows at a time; -> how far off the worst row is."""
    worst = {"share": 0.0, "logprob": 0.0}
    for begin in range(0, len(logits), 32):
        part = slice(begin, begin + 32)
        x = logits[part, :VOCABULARY].float()
        ids = got.ids[part]
        assert bool(((ids >= 0) & (ids < VOCABULARY)).all()), "an id outside the vocabulary"
        if bool((rows["temperature"][part] > 0).all()):
            worst["share"] = max(worst["share"], share_error(x, {n: v[part] for n, v in rows.items()}, ids))
        else:
            assert torch.equal(ids, x.argmax(-1)), "greedy takes another id"
        if got.logprobs is None:
            continue
        exact = torch.log_softmax(x.double(), -1)
        errors = [(exact.gather(1, ids[:, None])[:, 0] - got.logprobs[part]).abs().max().item()]
        if num_topk:
            assert got.topk_ids is not None and got.topk_logprobs is not None
            errors.append((exact.gather(1, got.topk_ids[part]) - got.topk_logprobs[part]).abs().max().item())
            values, _ = _largest(exact, num_topk)
            errors.append((values - got.topk_logprobs[part]).abs().max().item())
            differing = got.topk_logprobs[part].diff(dim=-1) == 0
            ascending = got.topk_ids[part].diff(dim=-1) > 0
            assert bool((ascending | ~differing).all()), "equals out of id order"
        worst["logprob"] = max(worst["logprob"], *errors)
    assert worst["share"] <= SHARE_TOLERANCE and worst["logprob"] <= LOGPROB_TOLERANCE, worst
    return worst


def share_error(x: torch.Tensor, rows: Parameters, ids: torch.Tensor) -> float:
    """How far the uniform numbers lie outside the shares of the drawn ids, by float64."""
    scaled = (x - x.amax(-1, keepdim=True)) / rows["temperature"][:, None]
    kept = filter_logits(scaled, rows["top_k"], rows["top_p"], rows["min_p"])
    shares = torch.softmax(kept.double(), -1)
    high = shares.cumsum(-1).gather(1, ids[:, None])[:, 0]
    low = high - shares.gather(1, ids[:, None])[:, 0]
    # Rounding may also let one id more or less into a nucleus, which moves every share by as much as its own.
    border = torch.where(shares > 0, shares, torch.inf).amin(-1)
    allowed = torch.where((rows["top_p"] < 1) | (rows["min_p"] > 0), 2 * border, 0.0)
    errors = torch.maximum(low - rows["uniform"], rows["uniform"] - high) - allowed
    return errors.clamp(min=0).max().item()


def time_calls(call: Callable[[], Any], calls: int) -> float:
    """Median microseconds of one of the calls that `call` makes."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return statistics.median(times)


def time_in_graph(call: Callable[[], Any]) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            call()
    return time_calls(graph.replay, CALLS_PER_GRAPH)


def run_case(name: str, num_rows: int, dtype: torch.dtype) -> Result:
    setting = SETTINGS[name]
    num_topk = int(setting.get("num_topk", 0))
    records = bool(setting.get("records", 0)) or num_topk > 0
    logits, rows = make_case(num_rows, setting, dtype)

    def kernels() -> SampledRows:
        return sample_rows(logits, VOCABULARY, **rows, records=records, num_topk=num_topk)

    errors = check(logits, rows, kernels(), num_topk)
    differing = (kernels().ids != by_torch(logits, rows, records, num_topk)["ids"]).sum().item()
    microseconds = time_in_graph(kernels)
    read = logits.numel() * logits.element_size()
    return {
        "setting": name,
        "rows": num_rows,
        "dtype": str(dtype).removeprefix("torch."),
        "us": round(microseconds, 1),
        "torch_us": round(time_calls(lambda: by_torch(logits, rows, records, num_topk), 1), 1),
        "gb_per_s": round(read / microseconds / 1e3),
        "differing_from_torch": differing,
        "errors": errors,
    }


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    results: Result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cases": [],
        "failures": [],
    }
    print(results["gpu"], "torch", results["torch"], "triton", results["triton"])
    print(f"{'setting':<46}{'rows':>5} {'dtype':<9}{'us':>9}{'torch us':>10}{'GB/s':>7}{'ids off':>8}")
    target = Path(os.environ.get("OUT", ".")) / "sampling_kernels.json"
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows in ROWS:
            for name in SETTINGS:
                record_case(results, name, num_rows, dtype)
                target.write_text(json.dumps(results, indent=1))
    print(f"\nresults in {target}; {len(results['failures'])} failed")


def record_case(results: Result, name: str, num_rows: int, dtype: torch.dtype) -> None:
    try:
        with torch.inference_mode():
            case = run_case(name, num_rows, dtype)
    except Exception:
        traceback.print_exc()
        results["failures"].append({"setting": name, "rows": num_rows, "error": traceback.format_exc()})
        return
    results["cases"].append(case)
    print(
        f"{name:<46}{num_rows:>5} {case['dtype']:<9}{case['us']:>9}{case['torch_us']:>10}"
        f"{case['gb_per_s']:>7}{case['differing_from_torch']:>8}",
        flush=True,
    )


if __name__ == "__main__":
    main()
