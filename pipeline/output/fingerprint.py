"""What a job's output depends on, as flat keys and values: the reason why a resumed job is the same job.

Knows: which keys of the configuration cannot change the output, and how to word a difference. Every key
not named here counts, so that a new one is never forgotten.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.config import JobConfig

Scalar: TypeAlias = str | int | float | bool | None
Fingerprint: TypeAlias = dict[str, Any]

# Where and how fast, never what. A name ending in a dot stands for all keys below it.
NEUTRAL = (
    "output.dir",
    "output.commit_interval_s",
    "output.upload_interval_s",
    "output.storage_options",
    "output.stage_dir",
    "output.max_part_bytes",
    "output.retry_errors",
    "cost.",
    "report.",
    "cluster.",
    "launcher.",
    "bench.",
    "prompt.prefetch_rows",
    "source.storage_options",
    # known by what is in them (model.weights, model.tokenizer_hash …), so that they can be moved
    "model.path",
    "model.gguf_file",
    "model.adapter",
    "model.tokenizer",
    "model.stage_dir",
    # the grain of resume: a job keeps the one it started with
    "source.unit_rows",
    "source.allow_append",
    "source.streaming",
    "engine.mode",
    "engine.max_num_seqs",
    "engine.max_num_batched_tokens",
    "engine.num_blocks",
    "engine.kv_cache_gb",
    "engine.gpu_memory_utilization",
    "engine.cuda_graphs",
    "engine.prefix_sharing",
    "engine.admission_batch",
    "engine.lookahead",
    "engine.longest_first",
    "engine.timeline",
    "engine.timeline_steps",
    "engine.timeline_after",
    "engine.reserve",
)
_SHOWN = 60


def fingerprint(config: JobConfig, resolved: Mapping[str, Any]) -> Fingerprint:
    """Flat `key: value` of all that can change the output.

    resolved: what the configuration leaves open, under the key it settles (`sampling.temperature: 0.7`,
    `model.dtype: float32`) or a new one (`model.chat_template: <hash>`, `version`); it wins.
    """
    flat = flatten(dataclasses.asdict(config))
    flat["source.kind"] = type(config.source).__name__
    flat.update({key: plain(value) for key, value in resolved.items()})
    return {key: flat[key] for key in sorted(flat) if not is_neutral(key)}


def is_neutral(key: str) -> bool:
    return any(key == name or key.startswith(name if name[-1] == "." else f"{name}.") for name in NEUTRAL)


def flatten(values: Mapping[str, Any], prefix: str = "") -> Fingerprint:
    flat: Fingerprint = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = plain(value)
    return flat


def plain(value: Any) -> Any:
    """`value` as JSON gives it back, so that a stored fingerprint compares equal to a fresh one."""
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    assert value is None or isinstance(value, str | int | float | bool), f"{value!r} is no plain value"
    return value


def digest(values: Fingerprint) -> str:
    """One short name for a whole fingerprint."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def difference(old: Fingerprint, new: Fingerprint) -> list[str]:
    """A line `key: old → new` for each key that differs."""
    keys = sorted({*old, *new})
    return [_line(key, old, new) for key in keys if key not in old or key not in new or old[key] != new[key]]


def refuse_difference(directory: Path, old: Fingerprint, new: Fingerprint) -> None:
    """Raises ValueError listing every difference, unless there is none."""
    lines = difference(old, new)
    if lines:
        what = "this value" if len(lines) == 1 else "these values"
        raise ValueError(
            f"output.dir={directory} holds another job: {'; '.join(lines)}. Restore {what} to go on with it, "
            "or choose another output.dir"
        )


def _line(key: str, old: Fingerprint, new: Fingerprint) -> str:
    before = _shown(old[key]) if key in old else "(absent)"
    after = _shown(new[key]) if key in new else "(absent)"
    if max(len(before), len(after)) > _SHOWN:
        before, after = _around_difference(before, after)
    return f"{key}: {before} → {after}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _around_difference(before: str, after: str) -> tuple[str, str]:
    """Long values cut to where they part, so that the difference is seen."""
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), None)
    begin = max((min(len(before), len(after)) if same is None else same) - _SHOWN // 3, 0)

    def cut(text: str) -> str:
        piece = text[begin : begin + _SHOWN]
        return ("…" if begin else "") + piece + ("…" if begin + _SHOWN < len(text) else "")

    return cut(before), cut(after)
