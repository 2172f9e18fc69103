"""Paged caches of random values, and what attention over them is in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Against float64 of the same (rounded) inputs; weights and results are rounded to the type, by the
# interpreter towards zero.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass(frozen=True)
class Cache:
    """keys, values [N, H, P, D], block_tables int32 [R, B]; what belongs to no row is NaN."""

    keys: torch.Tensor
    values: torch.Tensor
    block_tables: torch.Tensor

    @property
    def page_size(self) -> int:
        return self.keys.shape[2]


def make_cache(
    lengths: Sequence[int],
    num_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Cache:
    """Pages in no order. Page 0 is nobody's; entries of the table beyond a row's length point to it."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // page_size) for length in lengths]
    numbers = (torch.randperm(sum(pages), generator=generator) + 1).tolist()
    shape = (sum(pages) + 1, num_heads, page_size, head_dim)
    keys, values = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    tables = torch.zeros(len(lengths), max(*pages, 1), dtype=torch.int32)
    for row, length in enumerate(lengths):
        for i in range(pages[row]):
            page = tables[row, i] = numbers.pop()
            used = min(page_size, length - i * page_size)
            for tensor in (keys, values):
                content = torch.randn(num_heads, used, head_dim, generator=generator)
                tensor[page, :, :used] = content.to(dtype)
    return Cache(keys.to(DEVICE), values.to(DEVICE), tables.to(DEVICE))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def attention(
    query: torch.Tensor,
    cache: Cache,
    row: int,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [L, Hq, D] at positions start.. of a row -> [L, Hq, D], all in float64, by definition."""
    length = start + query.shape[0]
    positions = torch.arange(length, device=query.device)
    page, offset = cache.block_tables[row].long()[positions // cache.page_size], positions % cache.page_size
    group = query.shape[1] // cache.keys.shape[1]
    keys = cache.keys[page, :, offset].double().repeat_interleave(group, 1)
    values = cache.values[page, :, offset].double().repeat_interleave(group, 1)
    distance = positions[start:, None] - positions[None, :]
    visible = (distance >= 0) & (distance < (window or length))
    # A window's pages behind it may be gone (NaN here).
    seen = visible.any(0)
    keys, values, visible = keys[seen], values[seen], visible[:, seen]
    scores = torch.einsum("lhd,phd->hlp", query.double(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.double()[:, None, None].expand(-1, query.shape[0], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : keys.shape[0]]
    return torch.einsum("hlp,phd->lhd", weights, values)


def drop_pages_behind(cache: Cache, row: int, first_position: int) -> None:
    """Gives the pages wholly before a position back: the table names page 0 in their place."""
    cache.block_tables[row, : first_position // cache.page_size] = 0


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE[actual.dtype])
