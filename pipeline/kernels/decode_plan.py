"""Cuts the rows of a decode step into splits of nearly equal length, on the device, once per step.

A work item is one split of one row: a range of positions that one program per KV head reads. The list is
made from the lengths as they are on the device, so the host neither waits for them nor launches programs
for splits that a row does not have. All layers with the same window share one plan.

- By batch (`bitwise=False`): all rows together are cut into about as many items as fill the GPU.
- Bitwise: a row is cut by its own length alone, at least BITWISE_SPLIT_TOKENS a split and at most
  BITWISE_MAX_SPLITS splits: what stands beside it cannot change a bit of it.

Shapes: R = rows, I = most work items, Hq = query heads, H = KV heads, D = head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pipeline.kernels.launch import DecodeLaunch, decode_launch

BITWISE_SPLIT_TOKENS = 512
BITWISE_MAX_SPLITS = 32
# Columns of a work item: its row, the positions [first, stop) it reads, its number among the row's splits.
ITEM_FIELDS: tl.constexpr = tl.constexpr(5)
ITEM_ROW: tl.constexpr = tl.constexpr(0)
ITEM_FIRST: tl.constexpr = tl.constexpr(1)
ITEM_STOP: tl.constexpr = tl.constexpr(2)
ITEM_SPLIT: tl.constexpr = tl.constexpr(3)
ITEM_NUM_SPLITS: tl.constexpr = tl.constexpr(4)


@triton.jit
def _plan_kernel(
    lengths_ptr: tl.tensor,
    items_ptr: tl.tensor,
    num_items_ptr: tl.tensor,
    num_rows: tl.tensor,
    window: tl.tensor,
    min_split_tiles: tl.tensor,
    batch_splits: tl.tensor,
    row_splits: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BY_BATCH: tl.constexpr,
) -> None:
    row = tl.arange(0, ROWS)
    length = tl.load(lengths_ptr + row, mask=row < num_rows, other=0)
    first = tl.maximum(length - window, 0) if HAS_WINDOW else tl.zeros_like(length)
    begin = first // BLOCK_N * BLOCK_N
    num_tiles = tl.cdiv(length - begin, BLOCK_N)
    limit = tl.cdiv(tl.sum(num_tiles, 0), batch_splits) if BY_BATCH else tl.cdiv(num_tiles, row_splits)
    split_tiles = tl.maximum(limit, min_split_tiles)
    # The row's tiles are shared out evenly over so many splits; rounding up may leave the last one empty, so
    # they are counted again. A row without positions keeps one empty item, which zeroes its output.
    share = tl.maximum(tl.cdiv(num_tiles, tl.maximum(tl.cdiv(num_tiles, split_tiles), 1)), 1)
    num_splits = tl.where(row < num_rows, tl.maximum(tl.cdiv(num_tiles, share), 1), 0)
    item = tl.cumsum(num_splits, 0) - num_splits
    tl.store(num_items_ptr, tl.sum(num_splits, 0))
    for split in range(0, tl.max(num_splits, 0)):
        target = items_ptr + (item + split) * ITEM_FIELDS
        start = begin + split * share * BLOCK_N
        mask = split < num_splits
        tl.store(target + ITEM_ROW, row, mask=mask)
        tl.store(target + ITEM_FIRST, tl.maximum(start, first), mask=mask)
        tl.store(target + ITEM_STOP, tl.minimum(start + share * BLOCK_N, length), mask=mask)
        tl.store(target + ITEM_SPLIT, tl.zeros_like(row) + split, mask=mask)
        tl.store(target + ITEM_NUM_SPLITS, num_splits, mask=mask)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Everything a decode step writes beside its output; allocated once, before graphs are captured.

    items int32 [I, 5], num_items int32 [1]: the plan. partials float32 [I, Hq, D], maxima and totals
    float32 [I, Hq]: a split's unfinished sums. arrivals int32 [R, H]: how many of a row's splits are done;
    zero between launches, because the last to arrive resets it. batch_splits: how many items fill the GPU.
    """

    items: torch.Tensor
    num_items: torch.Tensor
    partials: torch.Tensor
    maxima: torch.Tensor
    totals: torch.Tensor
    arrivals: torch.Tensor
    launch: DecodeLaunch
    batch_splits: int
    bitwise: bool

    @property
    def num_kv_heads(self) -> int:
        return self.arrivals.shape[1]

    def num_programs(self, num_rows: int) -> int:
        """Programs of a launch: one for every row that is not split, and enough to fill the GPU; items beyond
        that are shared. Programs that find nothing to do are not free: up to 3 % of a launch on an H200."""
        return max(num_rows, self.batch_splits) * self.num_kv_heads


def allocate_workspace(
    num_rows: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    max_context: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    bitwise: bool,
    launch: DecodeLaunch | None = None,
    num_programs: int | None = None,
) -> DecodeWorkspace:
    """For steps of at most num_rows rows of at most max_context positions. One per stream and window.

    num_programs: how many programs fill the GPU; by default the SMs times the launch's programs_per_sm.
    """
    group = num_query_heads // num_kv_heads
    launch = launch or decode_launch(head_dim * dtype.itemsize, page_size, group)
    if num_programs is None:
        num_programs = _num_processors(device) * launch.programs_per_sm
    batch_splits = max(1, num_programs // num_kv_heads)
    if bitwise:
        row_splits = min(BITWISE_MAX_SPLITS, triton.cdiv(max_context, BITWISE_SPLIT_TOKENS) + 1)
        num_items = num_rows * row_splits
    else:
        # Each row rounds up once, and what is not rounding adds up to batch_splits.
        num_items = num_rows + batch_splits

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return DecodeWorkspace(
        items=empty(num_items, ITEM_FIELDS.value, dtype=torch.int32),
        num_items=empty(1, dtype=torch.int32),
        partials=empty(num_items, num_query_heads, head_dim),
        maxima=empty(num_items, num_query_heads),
        totals=empty(num_items, num_query_heads),
        arrivals=torch.zeros((num_rows, num_kv_heads), dtype=torch.int32, device=device),
        launch=launch,
        batch_splits=batch_splits,
        bitwise=bitwise,
    )


def plan_decode(context_lens: torch.Tensor, workspace: DecodeWorkspace, window: int | None = None) -> None:
    """context_lens int32 [R] -> the workspace's items. window: positions a query sees, itself included."""
    num_rows = context_lens.shape[0]
    assert context_lens.dtype == torch.int32 and context_lens.is_contiguous()
    assert num_rows <= workspace.arrivals.shape[0] and (window is None or window > 0)
    block_n = workspace.launch.block_n
    rows = triton.next_power_of_2(num_rows)
    min_split_tiles = (
        max(1, BITWISE_SPLIT_TOKENS // block_n) if workspace.bitwise else workspace.launch.min_split_tiles
    )
    _plan_kernel[(1,)](
        context_lens,
        workspace.items,
        workspace.num_items,
        num_rows,
        window or 0,
        min_split_tiles,
        workspace.batch_splits,
        BITWISE_MAX_SPLITS,
        ROWS=rows,
        BLOCK_N=block_n,
        HAS_WINDOW=window is not None,
        BY_BATCH=not workspace.bitwise,
        num_warps=max(1, min(16, rows // 64)),
    )


def _num_processors(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4  # interpreted: enough for rows to be split at all
