"""The engine sizes that did best on one H200 in the shape of Llama-3.1-8B, by workload and engine.

A recipe asks for them where the user gave none. Knows numbers; refuses to know engines. Imports nothing
heavy: configurations are resolved before a job's imports.
"""

from __future__ import annotations

from typing import Any

_TRANSFORMERS = "transformers"
# A and B: 32 equal rows at once. C: so many of its 1,024 rows as the engine gains from.
_SIZES: dict[tuple[str, bool], dict[str, int]] = {
    ("A", False): {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "block_size": 64},
    ("B", False): {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "block_size": 64},
    ("C", False): {"max_num_seqs": 192, "max_num_batched_tokens": 2048, "block_size": 64},
    ("A", True): {"max_num_seqs": 32, "max_num_batched_tokens": 4096, "block_size": 256},
    ("B", True): {"max_num_seqs": 32, "max_num_batched_tokens": 4096, "block_size": 256},
    ("C", True): {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "block_size": 256},
}


def engine_size(name: str, workload: Any, rows: int | None, engine: str) -> int:
    """The size `engine.<name>` for a workload (None counts as B), no more sequences than rows.

    engine: the choice of the group `engine`.
    """
    letter = "B" if workload is None else getattr(workload, "value", str(workload))
    size = _SIZES[letter, engine == _TRANSFORMERS][name]
    return min(size, rows) if name == "max_num_seqs" and rows else size
