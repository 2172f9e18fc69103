"""Paged prefill against float64: chunks, decode rows among them, windows, caps, sinks, and bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernels.paged_cases import (
    Cache,
    assert_close,
    attention,
    drop_pages_behind,
    int32,
    make_cache,
    needs_gpu,
    random,
)

pytest.importorskip("triton", reason="the kernels need triton")

from pipeline.kernels.launch import PrefillLaunch  # noqa: E402
from pipeline.kernels.paged_prefill import paged_prefill  # noqa: E402

SMALL = PrefillLaunch(block_m=16, block_n=16, num_warps=4, num_stages=2)
# (position of the first query, queries) of each row: a whole prompt, a later chunk, a decode row, an empty
# one, a chunk that ends at a page's end, a first token.
ROWS = [(0, 37), (50, 13), (65, 1), (20, 0), (16, 16), (0, 1)]


def run(query: torch.Tensor, cache: Cache, rows: Sequence[tuple[int, int]], **options: Any) -> torch.Tensor:
    ends = torch.tensor([count for _, count in rows]).cumsum(0).tolist()
    return paged_prefill(
        query, cache.keys, cache.values, cache.block_tables, int32([0, *ends]),
        int32([start for start, _ in rows]), **options,
    )  # fmt: skip


def expected(
    query: torch.Tensor, cache: Cache, rows: Sequence[tuple[int, int]], scale: float, **options: Any
) -> torch.Tensor:
    chunks = query.split([count for _, count in rows])
    return torch.cat(
        [
            attention(chunk, cache, row, rows[row][0], scale, **options)
            for row, chunk in enumerate(chunks)
            if len(chunk)
        ]
    )


def cache_for(rows: Sequence[tuple[int, int]], *shape: Any) -> Cache:
    return make_cache([start + count for start, count in rows], *shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("head_dim", "group", "num_heads", "page_size"),
    [(64, 1, 2, 16), (64, 7, 1, 64), (80, 2, 1, 16), (96, 4, 1, 64), (128, 8, 1, 16), (128, 4, 2, 48)],
)
def test_chunks_of_all_kinds_equal_float64(head_dim, group, num_heads, page_size, dtype):
    cache = cache_for(ROWS, num_heads, head_dim, page_size, dtype)
    query = random(sum(count for _, count in ROWS), num_heads * group, head_dim, dtype=dtype)
    scale = head_dim**-0.5
    out = run(query, cache, ROWS, scale=scale)
    assert_close(out, expected(query, cache, ROWS, scale))


@pytest.mark.parametrize("window", [1, 5, 16, 30, 1000])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, True)], ids=["plain", "cap+sinks"])
@pytest.mark.parametrize("launch", [SMALL, None], ids=["page per tile", "pages per tile"])
def test_a_window_hides_what_lies_behind_it(launch, window, softcap, with_sinks):
    cache = cache_for(ROWS, 1, 64, 16)
    for row, (start, _) in enumerate(ROWS):
        drop_pages_behind(cache, row, max(start - window + 1, 0))
    query = 3 * random(sum(count for _, count in ROWS), 2, 64)
    options = {"window": window, "softcap": softcap, "sinks": random(2, seed=5) if with_sinks else None}
    out = run(query, cache, ROWS, scale=0.3, launch=launch, **options)
    assert_close(out, expected(query, cache, ROWS, 0.3, **options))


def test_tokens_outside_the_rows_are_left_alone():
    """A view of query_start_loc leaves the decode rows at the front to another kernel."""
    rows, front, end = [(0, 20), (30, 7)], 18, 45
    cache = cache_for(rows, 1, 64, 16)
    query = random(48, 2, 64)
    out = torch.full_like(query, 7.0)
    arguments = (query, cache.keys, cache.values, cache.block_tables, int32([18, 38, 45]), int32([0, 30]))
    paged_prefill(*arguments, scale=0.2, launch=SMALL, out=out)
    assert (out[:front] == 7).all() and (out[end:] == 7).all()
    assert_close(out[front:end], expected(query[front:end], cache, rows, 0.2))
    made = paged_prefill(*arguments, scale=0.2, launch=SMALL)
    assert torch.equal(made[front:end], out[front:end])
    assert not made[:front].any() and not made[end:].any()


def test_a_strided_query_of_a_fused_projection():
    cache = cache_for([(0, 20)], 2, 64, 16)
    fused = random(20, 8, 64)
    query = fused[:, :4]
    assert_close(run(query, cache, [(0, 20)], scale=0.2), expected(query, cache, [(0, 20)], 0.2))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("head_dim", "group", "page_size"), [(128, 4, 16), (128, 4, 64), (64, 7, 64), (96, 1, 16), (256, 2, 256)]
)
@pytest.mark.parametrize("options", [{}, {"window": 300, "softcap": 30.0}], ids=["plain", "window+cap"])
def test_large_chunks_on_the_gpu(head_dim, group, page_size, dtype, options):
    rows = [(0, 1500), (1000, 333), (2000, 1), (0, 64), (511, 2), (3, 0)]
    cache = cache_for(rows, 2, head_dim, page_size, dtype)
    query = random(sum(count for _, count in rows), 2 * group, head_dim, dtype=dtype)
    sinks = random(2 * group, seed=5)
    out = run(query, cache, rows, scale=head_dim**-0.5, sinks=sinks, **options)
    assert_close(out, expected(query, cache, rows, head_dim**-0.5, sinks=sinks, **options))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("window", [None, 300])
def test_bits_do_not_depend_on_the_chunks_on_the_gpu(window):
    """Not through the interpreter: numpy's products differ in the last bit with a row's place in the tile."""
    cache = cache_for([(0, 1200)], 8, 128, 64, torch.bfloat16)
    query = random(1200, 32, 128, dtype=torch.bfloat16)
    whole = run(query, cache, [(0, 1200)], scale=0.09, window=window)
    for cut in (1, 500, 1024, 1199):
        first = run(query[:cut], cache, [(0, cut)], scale=0.09, window=window)
        second = run(query[cut:], cache, [(cut, 1200 - cut)], scale=0.09, window=window)
        assert torch.equal(torch.cat([first, second]), whole), cut
