"""Paged decode against float64: shapes, windows, caps, sinks, padding, splits, and bits in `bitwise`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kernels.paged_cases import (
    DEVICE,
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

from pipeline.kernels.decode_plan import DecodeWorkspace, allocate_workspace, plan_decode  # noqa: E402
from pipeline.kernels.launch import DecodeLaunch  # noqa: E402
from pipeline.kernels.paged_decode import paged_decode  # noqa: E402

# Tiles of one small page, so that short rows have several.
SMALL = DecodeLaunch(block_n=16, num_warps=4, num_stages=3, min_split_tiles=1)


def workspace_for(
    query: torch.Tensor, cache: Cache, splits: int | None = None, bitwise: bool = False, **changes: Any
) -> DecodeWorkspace:
    """splits: how many splits the batch is cut into per KV head, where nothing else limits them."""
    num_heads = cache.keys.shape[1]
    return allocate_workspace(
        query.shape[0],
        query.shape[1],
        num_heads,
        query.shape[2],
        max_context=cache.block_tables.shape[1] * cache.page_size,
        page_size=cache.page_size,
        dtype=query.dtype,
        device=query.device,
        bitwise=bitwise,
        num_programs=None if splits is None else splits * num_heads,
        **changes,
    )


def expected_rows(
    query: torch.Tensor, cache: Cache, lengths: Sequence[int], scale: float, **options: Any
) -> torch.Tensor:
    rows = [
        attention(query[i : i + 1], cache, i, length - 1, scale, **options)
        if length
        else torch.zeros_like(query[i : i + 1], dtype=torch.float64)
        for i, length in enumerate(lengths)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("head_dim", "group", "num_heads", "page_size"),
    [(64, 1, 2, 16), (64, 7, 1, 64), (80, 2, 1, 16), (96, 4, 1, 64), (128, 8, 1, 16), (128, 4, 2, 48)],
)
def test_ragged_rows_equal_float64(head_dim, group, num_heads, page_size, dtype):
    lengths = [1, page_size, page_size + 1, 2 * page_size - 1, 3 * page_size + 5]
    cache = make_cache(lengths, num_heads, head_dim, page_size, dtype)
    query = random(len(lengths), num_heads * group, head_dim, dtype=dtype)
    scale = head_dim**-0.5
    out = paged_decode(query, cache.keys, cache.values, cache.block_tables, int32(lengths), scale=scale)
    assert out.dtype == dtype
    assert_close(out, expected_rows(query, cache, lengths, scale))


@pytest.mark.parametrize("window", [1, 5, 16, 70, 1000])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, True)], ids=["plain", "cap+sinks"])
@pytest.mark.parametrize("launch", [SMALL, None], ids=["page per tile", "pages per tile"])
def test_a_window_hides_what_lies_behind_it(launch, window, softcap, with_sinks):
    lengths = [1, 15, 70, 131]
    cache = make_cache(lengths, 1, 64, 16)
    for row, length in enumerate(lengths):
        drop_pages_behind(cache, row, max(length - window, 0))
    query = 3 * random(4, 2, 64)
    options = {"window": window, "softcap": softcap, "sinks": random(2, seed=5) if with_sinks else None}
    workspace = workspace_for(query, cache, splits=6, launch=launch)
    out = paged_decode(
        query, cache.keys, cache.values, cache.block_tables, int32(lengths), scale=0.3, workspace=workspace,
        **options,
    )  # fmt: skip
    assert_close(out, expected_rows(query, cache, lengths, 0.3, **options))


@pytest.mark.parametrize("size", [-300.0, 300.0])
def test_a_sink_far_from_the_scores_stays_finite(size):
    """Beyond the range of exp2 either the sink takes all weight or none."""
    cache = make_cache([40], 1, 64, 16)
    query = random(1, 1, 64)
    sinks = torch.tensor([size], device=DEVICE)
    out = paged_decode(query, cache.keys, cache.values, cache.block_tables, int32([40]), scale=1, sinks=sinks)
    assert_close(out, expected_rows(query, cache, [40], 1.0, sinks=sinks))


def test_padding_rows_are_zero_whatever_the_output_held():
    lengths = [0, 20, 0, 33, 0]
    cache = make_cache(lengths, 2, 64, 16)
    query = random(5, 4, 64)
    query[[0, 2, 4]] = float("nan")
    out = torch.full_like(query, float("nan"))
    sinks = random(4, seed=5)
    given = paged_decode(
        query, cache.keys, cache.values, cache.block_tables, int32(lengths), scale=0.2, sinks=sinks, out=out
    )
    assert given is out
    assert_close(out, expected_rows(query, cache, lengths, 0.2, sinks=sinks))
    assert not out[[0, 2, 4]].any()
    nothing = query[:0]
    assert paged_decode(
        nothing, cache.keys, cache.values, cache.block_tables[:0], int32([]), scale=1
    ).shape == (0, 4, 64)


@pytest.mark.parametrize("splits", range(1, 9))
def test_any_number_of_splits_gives_the_same_within_tolerance(splits):
    length = 8 * 16
    cache = make_cache([length], 2, 64, 16)
    query = random(1, 8, 64)
    workspace = workspace_for(query, cache, splits, launch=SMALL)
    out = paged_decode(
        query, cache.keys, cache.values, cache.block_tables, int32([length]), scale=0.2, workspace=workspace
    )
    tiles = -(-8 // splits)
    assert workspace.num_items.item() == -(-8 // tiles)
    assert_close(out, expected_rows(query, cache, [length], 0.2))
    assert not workspace.arrivals.any(), "the last to arrive resets the counter"


def test_a_workspace_serves_one_step_after_another():
    """Other lengths, fewer rows, a strided query: nothing of the step before remains."""
    lengths = [128, 40, 128]
    cache = make_cache(lengths, 2, 64, 16)
    fused = random(3, 8, 64)
    query = fused[:, 2:6]
    workspace = workspace_for(query, cache, splits=5, launch=SMALL)
    for now in (lengths, [1, 40, 100], [17, 0], [128]):
        rows = len(now)
        plan_decode(int32(now), workspace)
        out = paged_decode(
            query[:rows], cache.keys, cache.values, cache.block_tables[:rows], int32(now),
            scale=0.2, workspace=workspace, planned=True,
        )  # fmt: skip
        assert_close(out, expected_rows(query[:rows], cache, now, 0.2))


@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("window", [None, 100])
def test_a_plan_covers_what_each_row_sees_exactly_once(bitwise, window):
    lengths = [0, 1, 16, 2000, 100, 101, 0, 5000, 513, 512]
    query, cache = random(len(lengths), 2, 64), make_cache([16], 1, 64, 16)
    cache = Cache(cache.keys, cache.values, cache.block_tables.expand(len(lengths), 320))
    workspace = workspace_for(query, cache, splits=13, bitwise=bitwise, launch=SMALL)
    plan_decode(int32(lengths), workspace, window)
    count = int(workspace.num_items)
    assert count <= workspace.items.shape[0]
    items = workspace.items[:count].tolist()
    position = 0
    for row, length in enumerate(lengths):
        splits = [item for item in items if item[0] == row]
        assert items[position : position + len(splits)] == splits, "a row's splits lie beside each other"
        assert [item[3] for item in splits] == list(range(splits[0][4]))
        assert splits[0][1] == max(0, length - (window or length)) and splits[-1][2] == length
        assert all(left[2] == right[1] for left, right in zip(splits, splits[1:], strict=False))
        assert all(item[1] < item[2] for item in splits) or length == 0
        position += len(splits)
    assert position == count


def test_bitwise_rows_do_not_see_their_neighbours_nor_the_grid():
    """Batch 1 against 7, with few programs and many: equal bits, and more than one split."""
    lengths = [1500, 3, 700, 0, 64, 1030, 200]
    cache = make_cache(lengths, 1, 64, 16)
    query = random(7, 2, 64)
    table = cache.block_tables
    results = []
    for splits in (1, 3, 50):
        workspace = workspace_for(query, cache, splits, bitwise=True)
        results.append(
            paged_decode(
                query, cache.keys, cache.values, table, int32(lengths), scale=0.2, workspace=workspace
            )
        )
        assert workspace.items[0].tolist() == [0, 0, 512, 0, 3]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert_close(results[0], expected_rows(query, cache, lengths, 0.2))
    for row in range(7):
        here = slice(row, row + 1)
        alone = paged_decode(
            query[here], cache.keys, cache.values, table[here], int32(lengths[here]), scale=0.2, bitwise=True
        )
        assert torch.equal(alone[0], results[0][row])


def test_by_batch_a_long_row_is_cut_only_where_the_batch_leaves_room():
    query, cache = random(40, 2, 64), make_cache([16], 1, 64, 16)
    cache = Cache(cache.keys, cache.values, cache.block_tables.expand(40, 64))
    workspace = workspace_for(query, cache, splits=16, launch=SMALL)
    plan_decode(int32([1024]), workspace)
    assert workspace.num_items.item() == 16
    plan_decode(int32([1024] * 40), workspace)
    assert workspace.num_items.item() == 40


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("head_dim", "group", "page_size"), [(128, 4, 16), (128, 4, 64), (64, 8, 64), (96, 1, 16), (256, 2, 256)]
)
@pytest.mark.parametrize("options", [{}, {"window": 1000, "softcap": 30.0}], ids=["plain", "window+cap"])
def test_large_batches_on_the_gpu(head_dim, group, page_size, dtype, options):
    lengths = [1 + (i * 379) % 4000 for i in range(31)] + [0]
    cache = make_cache(lengths, 4, head_dim, page_size, dtype)
    query = random(32, 4 * group, head_dim, dtype=dtype)
    sinks = random(4 * group, seed=5)
    expected = expected_rows(query, cache, lengths, head_dim**-0.5, sinks=sinks, **options)
    for bitwise in (False, True):
        out = paged_decode(
            query, cache.keys, cache.values, cache.block_tables, int32(lengths),
            scale=head_dim**-0.5, sinks=sinks, bitwise=bitwise, **options,
        )  # fmt: skip
        assert_close(out, expected)


@pytest.mark.gpu
@needs_gpu
def test_a_captured_step_follows_the_lengths_on_the_device():
    """Replays with other lengths; a hundred runs of one give one result: no race in the combining."""
    most = [4096] * 8
    cache = make_cache(most, 8, 128, 64, torch.bfloat16)
    query, lengths = random(8, 32, 128, dtype=torch.bfloat16), int32(most)
    out = torch.empty_like(query)
    workspace = workspace_for(query, cache)

    def step() -> None:
        plan_decode(lengths, workspace)
        paged_decode(
            query, cache.keys, cache.values, cache.block_tables, lengths,
            scale=0.09, workspace=workspace, planned=True, out=out,
        )  # fmt: skip

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for now in (most, [1, 0, 77, 4096, 3000, 64, 65, 2048], [3] * 8):
        lengths.copy_(int32(now))
        graph.replay()
        torch.cuda.synchronize()
        first = out.clone()
        assert_close(first, expected_rows(query, cache, now, 0.09))
        for _ in range(100):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out, first)


@pytest.mark.gpu
@needs_gpu
def test_bitwise_on_the_gpu_for_one_row_and_many():
    lengths = [1 + (i * 379) % 5000 for i in range(64)]
    cache = make_cache(lengths, 8, 128, 64, torch.bfloat16)
    query = random(64, 32, 128, dtype=torch.bfloat16)
    table = cache.block_tables
    together = paged_decode(query, cache.keys, cache.values, table, int32(lengths), scale=0.09, bitwise=True)
    for row in range(64):
        here = slice(row, row + 1)
        alone = paged_decode(
            query[here], cache.keys, cache.values, table[here], int32(lengths[here]), scale=0.09, bitwise=True
        )
        assert torch.equal(alone[0], together[row]), row
