"""Times the attention kernels on a GPU and sweeps their launches: `python benchmarks/attention_kernels.py`.

The shape is Llama-3.1-8B's: 32 query heads, 8 KV heads, 128 wide, bfloat16. Every configuration is checked
against float64 before it is timed; launches are timed in CUDA graphs over so many caches that none is found
in L2 again; figures are medians. Decode counts the bytes of keys and values, prefill the operations of the
causal half. FlashAttention-3 stands beside them where a package of it can be imported. `--quick` times the
launches of the table in pipeline/kernels/launch.py alone. Results go to $OUT/attention_kernels.json.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.kernels.decode_plan import DecodeWorkspace, allocate_workspace, plan_decode  # noqa: E402
from pipeline.kernels.kv_write import write_kv  # noqa: E402
from pipeline.kernels.launch import DecodeLaunch, PrefillLaunch, decode_launch, prefill_launch  # noqa: E402
from pipeline.kernels.paged_decode import paged_decode  # noqa: E402
from pipeline.kernels.paged_prefill import paged_prefill  # noqa: E402

QUERY_HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
SCALE = HEAD_DIM**-0.5
PAGES = (16, 64)
LAUNCHES_PER_GRAPH = 20
BYTES_TO_BEAT_L2 = 1_000_000_000

# Names and lengths of rows. The last has the lengths of a busy batch: short and long beside each other.
DECODE_SHAPES: dict[str, list[int]] = {
    f"{rows} x {context}": [context] * rows
    for rows, context in [(1, 8192), (32, 1024), (32, 4096), (32, 8192), (256, 512), (256, 1024), (512, 768)]
} | {"256 mixed 64..4096": [int(64 * 64 ** ((i * 97 % 256) / 255)) for i in range(256)]}
# (block_n, num_stages, num_warps): see launch.py for what a stage is.
DECODE_LAUNCHES = [
    (64, 3, 4), (64, 5, 4), (64, 7, 4), (64, 5, 2), (64, 5, 8),
    (32, 5, 4), (32, 7, 4), (32, 9, 4), (32, 7, 2), (128, 3, 4), (128, 3, 8), (128, 5, 8),
]  # fmt: skip
PROGRAMS_PER_SM = (1, 2, 3, 4, 6, 8, 12)
# (block_m, block_n, num_stages, num_warps)
PREFILL_LAUNCHES = [
    (128, 64, 3, 8), (128, 64, 5, 8), (128, 64, 7, 8), (128, 32, 5, 8), (128, 128, 3, 8),
    (64, 64, 3, 4), (64, 64, 5, 4), (64, 32, 5, 4), (64, 128, 3, 4),
]  # fmt: skip
PREFILL_ROWS = [2048] * 8

Result = dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """Rows of given lengths over `copies` distinct caches that share one block table."""

    lengths: list[int]
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    block_tables: torch.Tensor
    context_lens: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.caches[0][0].shape[2]

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths) * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def make_batch(lengths: list[int], page_size: int) -> Batch:
    pages = [-(-length // page_size) for length in lengths]
    order = (torch.randperm(sum(pages)) + 1).split(pages)
    tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for row, numbers in enumerate(order):
        tables[row, : len(numbers)] = numbers
    shape = (sum(pages) + 1, KV_HEADS, page_size, HEAD_DIM)
    bytes_per_copy = 2 * DTYPE.itemsize * torch.Size(shape).numel()
    copies = max(2, -(-BYTES_TO_BEAT_L2 // bytes_per_copy))
    caches = [
        (torch.randn(shape, device="cuda", dtype=DTYPE), torch.randn(shape, device="cuda", dtype=DTYPE))
        for _ in range(copies)
    ]
    context_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Batch(lengths, caches, tables.cuda(), context_lens)


def reference(query: torch.Tensor, batch: Batch, row: int, start: int) -> torch.Tensor:
    """query [L, Hq, D] at positions start.. of a row of the first cache -> [L, Hq, D] in float64."""
    length, page_size = start + query.shape[0], batch.page_size
    positions = torch.arange(length, device="cuda")
    page, offset = batch.block_tables[row].long()[positions // page_size], positions % page_size
    group = QUERY_HEADS // KV_HEADS
    keys, values = (t[page, :, offset].double().repeat_interleave(group, 1) for t in batch.caches[0])
    scores = torch.einsum("lhd,phd->hlp", query.double(), keys) * SCALE
    hidden = positions[None, :] > positions[start:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hlp,phd->lhd", weights, values)


def check(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    error = ((actual.double() - expected).norm() / expected.norm()).item()
    if not error < 1e-2:
        raise SystemExit(f"{name}: wrong by {error:.2e} of the result's norm")


def median_seconds(launch: Callable[[int], object], replays: int = 9) -> float:
    """launch(i): one launch over cache i. Seconds of one, the median over replays of a graph of several."""
    torch.cuda.synchronize()  # what the launch reads was made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(0)  # compiled before capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Without torch.cuda.graph, which collects garbage and empties the cache at every capture.
        graph.capture_begin()
        for i in range(LAUNCHES_PER_GRAPH):
            launch(i)
        graph.capture_end()
        times = []
        for replay in range(replays + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The graph is queued while the GPU is busy: its launch by the host is not in the figure.
            torch.cuda._sleep(400_000)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 2:
                times.append(begin.elapsed_time(end) / 1e3 / LAUNCHES_PER_GRAPH)
    return statistics.median(times)


def workspace_for(num_rows: int, max_context: int, launch: DecodeLaunch, bitwise: bool) -> DecodeWorkspace:
    return allocate_workspace(
        num_rows,
        QUERY_HEADS,
        KV_HEADS,
        HEAD_DIM,
        max_context=max_context,
        page_size=PAGES[0],  # decides nothing when the launch is given
        dtype=DTYPE,
        device=torch.device("cuda"),
        bitwise=bitwise,
        launch=launch,
    )


def time_decode(
    batch: Batch, launch: DecodeLaunch, bitwise: bool, expected: dict[int, torch.Tensor]
) -> Result:
    query = decode_query(batch)
    out = torch.full_like(query, float("nan"))
    workspace = workspace_for(len(batch.lengths), max(batch.lengths), launch, bitwise)
    plan_decode(batch.context_lens, workspace)

    def run(i: int) -> None:
        keys, values = batch.caches[i % len(batch.caches)]
        paged_decode(
            query, keys, values, batch.block_tables, batch.context_lens,
            scale=SCALE, workspace=workspace, planned=True, out=out,
        )  # fmt: skip

    run(0)
    for row, right in expected.items():
        check(out[row], right, f"decode, page {batch.page_size}, {launch}, bitwise={bitwise}, row {row}")
    seconds = median_seconds(run)
    return {
        "page": batch.page_size,
        "bitwise": bitwise,
        **asdict(launch),
        "items": int(workspace.num_items),
        "us": seconds * 1e6,
        "tb_s": batch.num_bytes / seconds / 1e12,
    }


def decode_query(batch: Batch) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (len(batch.lengths), QUERY_HEADS, HEAD_DIM)
    return torch.randn(shape, device="cuda", dtype=DTYPE, generator=generator)


def decode_launches(page_size: int, quick: bool) -> Iterator[DecodeLaunch]:
    default = decode_launch(HEAD_DIM * DTYPE.itemsize, page_size, QUERY_HEADS // KV_HEADS)
    yield default
    if quick:
        return
    for (block_n, num_stages, num_warps), programs in itertools.product(DECODE_LAUNCHES, PROGRAMS_PER_SM):
        launch = DecodeLaunch(block_n, num_warps, num_stages, programs, default.min_split_tiles)
        if launch != default:
            yield launch
    for min_split_tiles in (1, 4):
        yield replace(default, min_split_tiles=min_split_tiles)


def flash_attention_3() -> Any | None:
    for name in ("flash_attn_interface", "fa3_fwd_interface", "fa3_fwd"):
        if importlib.util.find_spec(name):
            return importlib.import_module(name)
    print("FlashAttention-3 is not compared: no package of it here")
    return None


def time_decode_flash(flash: Any, batch: Batch, expected: dict[int, torch.Tensor]) -> Result | None:
    """Over the same pages; over contiguous caches where the package was built without pages."""
    query = decode_query(batch)[:, None]

    def attend(keys: torch.Tensor, values: torch.Tensor, **pages: torch.Tensor) -> torch.Tensor:
        out = flash.flash_attn_with_kvcache(
            query, keys, values, cache_seqlens=batch.context_lens, softmax_scale=SCALE, causal=True, **pages
        )
        return out[0] if isinstance(out, tuple) else out

    def paged(i: int) -> torch.Tensor:
        keys, values = (t.transpose(1, 2) for t in batch.caches[i % len(batch.caches)])
        return attend(keys, values, page_table=batch.block_tables)

    def contiguous(i: int) -> torch.Tensor:
        rows, length = len(batch.lengths), batch.lengths[0]
        keys, values = (
            t.flatten()[: rows * length * KV_HEADS * HEAD_DIM].view(rows, length, KV_HEADS, HEAD_DIM)
            for t in batch.caches[i % len(batch.caches)]
        )
        return attend(keys, values)

    paging = True
    try:
        out = paged(0)
        for row, right in expected.items():
            check(out[row, 0], right, f"FlashAttention-3, page {batch.page_size}, row {row}")
    except RuntimeError as error:
        if len(set(batch.lengths)) > 1:
            return None
        paging = False
        print(f"  FlashAttention-3 without pages: {str(error).splitlines()[0][:100]}")
    seconds = median_seconds(paged if paging else contiguous)
    return {
        "page": batch.page_size if paging else None,
        "us": seconds * 1e6,
        "tb_s": batch.num_bytes / seconds / 1e12,
    }


def settings(result: Result) -> str:
    return (
        f"n{result['block_n']} s{result['num_stages']} w{result['num_warps']} x{result['programs_per_sm']}"
        f" m{result['min_split_tiles']}"
    )


def decode(quick: bool, flash: Any | None) -> list[Result]:
    print("\ndecode, TB/s of keys and values; best of the sweep with block_n, stages, warps, programs per SM")
    print(
        f"{'rows x context':>20} {'page':>5} {'table':>6} {'best':>6} {'bitwise':>8} {'FA3':>6}  best launch"
    )
    results: list[Result] = []
    for (name, lengths), page_size in itertools.product(DECODE_SHAPES.items(), PAGES):
        batch = make_batch(lengths, page_size)
        query = decode_query(batch)
        rows = {0, len(lengths) // 2, len(lengths) - 1, lengths.index(max(lengths))}
        expected = {row: reference(query[row][None], batch, row, lengths[row] - 1)[0] for row in rows}
        swept = [time_decode(batch, launch, False, expected) for launch in decode_launches(page_size, quick)]
        best = max(swept, key=lambda result: result["tb_s"])
        fields = DecodeLaunch.__dataclass_fields__
        best_launch = DecodeLaunch(**{field: best[field] for field in fields})
        bitwise = time_decode(batch, best_launch, True, expected)
        results += [{"kernel": "decode", "shape": name, **result} for result in (*swept, bitwise)]
        flash_text = "-"
        if flash is not None:
            peer = time_decode_flash(flash, batch, expected)
            if peer is not None:
                results.append({"kernel": "decode FA3", "shape": name, **peer})
                flash_text = f"{peer['tb_s']:.2f}"
        print(
            f"{name:>20} {page_size:>5} {swept[0]['tb_s']:>6.2f} {best['tb_s']:>6.2f} {bitwise['tb_s']:>8.2f}"
            f" {flash_text:>6}  {settings(best)}, {best['items']} items, {best['us']:.1f} us",
            flush=True,
        )
        del batch
        torch.cuda.empty_cache()
    if not quick:
        print_best_overall(results)
    return results


def print_best_overall(results: list[Result]) -> None:
    """The launches that lose least over all shapes: mean share of each shape's best."""
    swept = [r for r in results if r["kernel"] == "decode" and not r["bitwise"]]
    print("\nlaunches by their mean share of the best of each shape")
    for page_size in PAGES:
        best: dict[str, float] = {}
        shares: dict[str, list[float]] = {}
        here = [r for r in swept if r["page"] == page_size]
        for result in here:
            best[result["shape"]] = max(best.get(result["shape"], 0.0), result["tb_s"])
        for result in here:
            shares.setdefault(settings(result), []).append(result["tb_s"] / best[result["shape"]])
        ranking = sorted(shares, key=lambda name: -statistics.mean(shares[name]))
        for name in ranking[:6]:
            share = shares[name]
            print(
                f"  page {page_size:>3}  {name:<18} mean {statistics.mean(share):.3f}  worst {min(share):.3f}"
            )


def prefill(quick: bool, flash: Any | None) -> list[Result]:
    lengths = PREFILL_ROWS
    tokens = sum(lengths)
    operations = sum(4 * QUERY_HEADS * HEAD_DIM * n * (n + 1) / 2 for n in lengths)
    print(f"\nprefill of {len(lengths)} x {lengths[0]} tokens, TFLOP/s")
    results: list[Result] = []
    query = torch.randn(tokens, QUERY_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
    start_loc = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    starts = torch.zeros(len(lengths), dtype=torch.int32, device="cuda")
    out = torch.empty_like(query)

    def record(name: str, seconds: float, **fields: Any) -> None:
        rate = operations / seconds / 1e12
        results.append({"kernel": name, "us": seconds * 1e6, "tflop_s": rate, **fields})
        print(f"  {name:<12} {' '.join(f'{k}={v}' for k, v in fields.items()):<70} {rate:>6.0f}", flush=True)

    for page_size in PAGES:
        batch = make_batch(lengths, page_size)
        keys, values = batch.caches[0]
        expected = reference(query[: lengths[0]], batch, 0, 0)
        default = prefill_launch(HEAD_DIM * DTYPE.itemsize, page_size, QUERY_HEADS // KV_HEADS)
        launches = [default]
        if not quick:
            launches += [PrefillLaunch(m, n, warps, stages) for m, n, stages, warps in PREFILL_LAUNCHES]
        for launch in dict.fromkeys(launches):

            def run(
                _: int,
                launch: PrefillLaunch = launch,
                keys: torch.Tensor = keys,
                values: torch.Tensor = values,
                tables: torch.Tensor = batch.block_tables,
            ) -> None:
                paged_prefill(
                    query, keys, values, tables, start_loc, starts, scale=SCALE, out=out, launch=launch
                )

            out.fill_(float("nan"))
            try:
                run(0)
            except triton.runtime.errors.OutOfResources as error:
                print(f"  {launch}: {error}")
                continue
            check(out[: lengths[0]], expected, f"prefill, page {page_size}, {launch}")
            record("prefill", median_seconds(run), page=page_size, **asdict(launch))
    del batch, keys, values
    dense = [
        torch.randn(len(lengths), heads, lengths[0], HEAD_DIM, device="cuda", dtype=DTYPE)
        for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
    ]
    attend = torch.nn.functional.scaled_dot_product_attention
    record(
        "torch SDPA",
        median_seconds(lambda _: attend(dense[0], dense[1], dense[2], is_causal=True, enable_gqa=True)),
    )
    if flash is not None:
        packed = [t.transpose(1, 2).reshape(tokens, -1, HEAD_DIM) for t in dense]
        most = max(lengths)
        record(
            "FA3 varlen",
            median_seconds(
                lambda _: flash.flash_attn_varlen_func(*packed, start_loc, start_loc, most, most, causal=True)
            ),
        )
    return results


def small_kernels() -> list[Result]:
    """What a step adds once (plan) and a layer adds each time (write)."""
    print("\nsmall kernels, us")
    results: list[Result] = []
    for rows in (32, 256, 1024):
        lens = torch.full((rows,), 2000, dtype=torch.int32, device="cuda")
        for bitwise in (False, True):
            workspace = workspace_for(rows, 2000, decode_launch(HEAD_DIM * DTYPE.itemsize, 16, 4), bitwise)
            seconds = median_seconds(lambda _, w=workspace, n=lens: plan_decode(n, w))  # type: ignore[misc]
            results.append({"kernel": "plan", "rows": rows, "bitwise": bitwise, "us": seconds * 1e6})
            print(f"  plan of {rows} rows, bitwise={bitwise}: {seconds * 1e6:.2f}", flush=True)
    for tokens in (32, 512, 8192):
        fused = torch.randn(tokens, QUERY_HEADS + 2 * KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
        new_keys, new_values = fused[:, QUERY_HEADS:].split(KV_HEADS, 1)
        batch = make_batch([8192 * 2], 64)
        slots = torch.randperm(8192, device="cuda")[:tokens]
        for num_warps in (2, 4, 8):

            def run(
                i: int, n: int = num_warps, k: Any = new_keys, v: Any = new_values, s: Any = slots
            ) -> None:
                write_kv(k, v, *batch.caches[i % len(batch.caches)], s, num_warps=n)  # noqa: B023

            seconds = median_seconds(run)
            results.append({"kernel": "write", "tokens": tokens, "num_warps": num_warps, "us": seconds * 1e6})
            print(f"  write of {tokens} tokens, {num_warps} warps: {seconds * 1e6:.2f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the launches of the table")
    parser.add_argument("--only", default="small,prefill,decode", help="of small, prefill, decode")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("attention_kernels.py times a GPU, and here is none")
    torch.manual_seed(0)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    print(*about.values(), sep=", ")
    flash = flash_attention_3()
    results: list[Result] = []
    only = arguments.only.split(",")
    target = Path(os.environ.get("OUT", ".")) / "attention_kernels.json"
    if "small" in only:
        results += small_kernels()
    if "prefill" in only:
        results += prefill(arguments.quick, flash)
    target.write_text(json.dumps({**about, "results": results}, indent=1))
    if "decode" in only:
        results += decode(arguments.quick, flash)
    target.write_text(json.dumps({**about, "results": results}, indent=1))
    print(f"\n{len(results)} results in {target}")


if __name__ == "__main__":
    main()
