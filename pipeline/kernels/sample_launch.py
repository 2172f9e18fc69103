"""How the sampling kernels are launched, and what they hand on to one another.

The sizes are fixed, not tuned at run time: a row's sums are added in the order they set.

Shapes: N = rows, C = chunks of a row, G = groups of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class SampleLaunch:
    """chunk: ids a program of a scan reads, at most 2**15; groups: of a chunk, see sample_scan.

    listed: how many likeliest ids are listed for a row with top-p, and the most for top-k and alternatives;
    segment: list entries a chunk has; tile: entries of a row that are looked at, all at once. block, ways: of
    the search over a whole row. All powers of two. Results depend on these by rounding alone.
    """

    chunk: int = 4096
    groups: int = 512
    listed: int = 2048
    segment: int = 1024
    tile: int = 4096
    block: int = 1024
    ways: int = 8
    scan_warps: int = 16
    row_warps: int = 16


DEFAULT_LAUNCH = SampleLaunch()


@dataclass(frozen=True)
class SampleScratch:
    """What the kernels hand on; its fields are described where they are written."""

    maxima: torch.Tensor
    sums: torch.Tensor
    first: torch.Tensor
    groups: torch.Tensor
    highest: torch.Tensor
    log_total: torch.Tensor
    best: torch.Tensor
    reach: torch.Tensor
    masses: torch.Tensor
    counts: torch.Tensor
    listed: torch.Tensor
    ranks: torch.Tensor

    @property
    def num_chunks(self) -> int:
        return self.maxima.shape[1]


def allocate_scratch(
    num_rows: int, vocab_size: int, launch: SampleLaunch, device: torch.device
) -> SampleScratch:
    num_chunks = triton.cdiv(vocab_size, launch.chunk)
    segment = min(launch.segment, launch.chunk)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=device)

    return SampleScratch(
        maxima=empty(num_chunks),
        sums=empty(num_chunks),
        first=empty(num_chunks, dtype=torch.int32),
        groups=empty(num_chunks, launch.groups),
        highest=empty(),
        log_total=empty(),
        best=empty(dtype=torch.int32),
        reach=empty(),
        masses=empty(num_chunks, dtype=torch.float64),
        counts=empty(num_chunks, dtype=torch.int32),
        listed=empty(num_chunks, segment, dtype=torch.int16),
        ranks=empty(num_chunks, dtype=torch.int32),
    )
