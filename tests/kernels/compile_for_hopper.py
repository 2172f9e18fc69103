"""Compiles the kernels for compute capability 9.0 without a GPU and prints what each takes, as JSON lines.

A program of its own: within the tests Triton interprets. The interpreter accepts what the compiler refuses.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pipeline.kernels import (
    decode_plan,
    kv_write,
    paged_decode,
    paged_prefill,
    sample_draw,
    sample_largest,
    sample_scan,
)
from pipeline.kernels.launch import decode_launch, prefill_launch
from pipeline.kernels.sample_launch import DEFAULT_LAUNCH
from pipeline.kernels.tiles import dot_settings

TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def compile_kernel(
    name: str, kernel: Any, pointers: dict[str, str], constants: dict[str, Any], **options: int
):
    signature = dict.fromkeys(kernel.arg_names, "i32")
    signature |= {n: "fp32" for n in ("score_scale", "softcap") if n in signature}
    signature |= dict.fromkeys(constants, "constexpr") | {n: f"*{kind}" for n, kind in pointers.items()}
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (i,): aligned
        for i, n in enumerate(kernel.arg_names)
        if n in pointers or n == "width" or n.startswith("stride")
    }
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)[0]
    print(
        json.dumps(
            {
                "name": name,
                "registers": int(registers),
                "spilled_bytes": int(stack),
                "shared_memory": compiled.metadata.shared,
                "wgmma": "wgmma" in compiled.asm["ptx"],
                "vector_loads": "v4.b32" in compiled.asm["ptx"],
            }
        ),
        flush=True,
    )


def attention(
    name: str, dtype: torch.dtype, head_dim: int, page_size: int, group: int, features: bool
) -> None:
    prefill = name == "prefill"
    kernel = paged_prefill._prefill_kernel if prefill else paged_decode._decode_kernel
    choose = prefill_launch if prefill else decode_launch
    launch: Any = choose(head_dim * dtype.itemsize, page_size, group)
    kinds = {"query": TYPES[dtype], "keys": TYPES[dtype], "values": TYPES[dtype], "out": TYPES[dtype]}
    kinds |= {"sinks": "fp32", "table": "i32", "start_loc": "i32", "starts": "i32"}
    kinds |= {"items": "i32", "num_items": "i32", "arrivals": "i32"}
    kinds |= {"partials": "fp32", "maxima": "fp32", "totals": "fp32"}
    pointers = {f"{n}_ptr": kind for n, kind in kinds.items() if f"{n}_ptr" in kernel.arg_names}
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_PADDED": triton.next_power_of_2(head_dim),
        "PAGE": page_size,
        "BLOCK_N": launch.block_n,
        "HAS_SOFTCAP": features,
        "HAS_SINKS": features,
    } | dot_settings(dtype)
    if prefill:
        constants |= {"ROWS": 32, "BLOCK_M": launch.block_m, "HAS_WINDOW": features}
    else:
        constants |= {"NUM_KV_HEADS": 8, "GROUP_PADDED": 16}
    label = f"{name} {TYPES[dtype]} {head_dim} page {page_size}{' features' * features}"
    compile_kernel(
        label, kernel, pointers, constants, num_warps=launch.num_warps, num_stages=launch.num_stages
    )


def sampling(dtype: torch.dtype, **given: int) -> None:
    """Of 262k ids; what a kernel takes of the pointers and constants is taken from one list of all.

    given: arguments that are 1, which are constants to the compiler.
    """
    launch = DEFAULT_LAUNCH
    kinds = {"logits": TYPES[dtype], "top_k": "i32", "uniform": "fp64", "masses": "fp64", "listed": "i16"}
    kinds |= dict.fromkeys(("first", "best", "counts", "ranks"), "i32") | {"ids": "i64"}
    constants = {"RECORDS": True, "CHUNK": launch.chunk, "GROUPS": launch.groups, "CHUNKS": 64}
    constants |= {"LISTED": launch.listed, "SEGMENT": launch.segment, "TILE": launch.tile, "TOPK": 32}
    constants |= {"BLOCK": launch.block, "WAYS": launch.ways}
    scans = (sample_scan._stats_kernel, sample_scan._select_kernel)
    for kernel in (
        *scans,
        sample_scan._combine_kernel,
        sample_draw._draw_kernel,
        sample_largest._largest_kernel,
    ):
        pointers = {n: kinds.get(n[:-4], "fp32") for n in kernel.arg_names if n.endswith("_ptr")}
        taken = {n: value for n, value in (constants | given).items() if n in kernel.arg_names}
        if kernel is sample_largest._largest_kernel:
            taken["WAYS"] = launch.ways // 2
        warps = launch.scan_warps if kernel in scans else launch.row_warps
        name = " ".join([f"sample{kernel.__name__}", TYPES[dtype], *given])
        compile_kernel(name, kernel, pointers, taken, num_warps=warps)


def main() -> None:
    attention("decode", torch.bfloat16, 128, 64, 4, features=False)
    attention("decode", torch.bfloat16, 96, 16, 7, features=True)
    attention("prefill", torch.bfloat16, 128, 64, 4, features=False)
    attention("prefill", torch.bfloat16, 64, 16, 7, features=True)
    plan = decode_plan._plan_kernel
    constants = {"ROWS": 256, "BLOCK_N": 64, "HAS_WINDOW": True, "BY_BATCH": True}
    lists = {n: "i32" for n in plan.arg_names if n.endswith("_ptr")}
    compile_kernel("plan", plan, lists, constants, num_warps=4)
    write = kv_write._write_kernel
    tensors = {n: "i64" if n == "slot_ptr" else "bf16" for n in write.arg_names if n.endswith("_ptr")}
    sizes = {"NUM_HEADS": 8, "HEAD_DIM": 128, "PAGE": 64, "BLOCK": 1024}
    compile_kernel("write", write, tensors, sizes, num_warps=4)
    for dtype in TYPES:
        sampling(dtype)
    sampling(torch.float32, num_chunks=1, num_topk=1)


if __name__ == "__main__":
    assert tl.bfloat16 is dot_settings(torch.bfloat16)["DOT_TYPE"], "compiled, not interpreted"
    main()
