"""A benchmark's result as text. Plain values in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIZES = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "gpu_memory_utilization",
    "cuda_graphs",
)
_VERSIONS = ("python", "torch", "transformers", "triton", "commit")


def as_table(result: Mapping[str, Any]) -> str:
    """Two columns: what, and how much. result: as it is written to JSON."""
    lines = [*_subject_lines(result), *_figure_lines(result), *_origin_lines(result)]
    width = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in lines)


def _subject_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    sizes = ", ".join(f"{name} {_word(result['config']['engine'][name])}" for name in _SIZES)
    return [
        ("workload", f"{result['workload']}, {result['engine']}, {result['mode']}"),
        (
            "rows",
            f"{result['rows']:,}, {result['prompt_tokens']:,} tokens in, {result['new_tokens']:,} tokens out",
        ),
        ("model", f"{result['parameters'] / 1e9:.3f} B parameters, {result['dtype']}, {result['attention']}"),
        ("sizes", sizes),
    ]


def _figure_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    median, (fastest, slowest) = result["median"], result["spread"]["seconds"]
    start, memory = result["start_up_seconds"], result["peak_gpu_memory"]
    lines = [
        (
            "seconds",
            f"{median['seconds']:.3f} ({fastest:.3f} to {slowest:.3f}, {len(result['runs'])} runs)",
        ),
        ("tokens/s", f"{median['tokens_per_s']:,.0f}"),
        ("ms/step", f"{median['ms_per_step']:.3f}, {median['steps']:,} steps"),
        ("busy", "not measured" if median["busy_share"] is None else f"{median['busy_share']:.1%}"),
        (
            "start-up",
            ", ".join(f"{name.replace('_', '-')} {seconds:.1f} s" for name, seconds in start.items()),
        ),
    ]
    if median["host_ms_per_step"]:
        phases = ", ".join(f"{name} {ms:.3f}" for name, ms in median["host_ms_per_step"].items())
        lines.insert(4, ("host ms/step", phases))
    if result["timeline"]:
        lines.append(("timeline", result["timeline"]))
    if memory:
        peak = f"{memory['allocated_gib']:.1f} GiB in tensors, {memory['reserved_gib']:.1f} GiB reserved"
        lines.append(("peak memory", peak))
    return lines


def _origin_lines(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = result["environment"]
    versions = ", ".join(f"{name} {_word(found[name])}" for name in _VERSIONS)
    return [
        ("device", f"{found['gpu'] or result['device']}, {found['gpus_visible']} GPUs"),
        ("with", versions),
    ]


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
