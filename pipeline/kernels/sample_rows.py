"""Samples every row of a step on the device: no wait for the host, nothing whose shape depends on data.

The rules are those of `pipeline.engine.sampler`, and so are the ids, but where the rounding of an exponential
decides. A row's result depends on its logits and its own parameters alone, bit for bit. All logits are read
twice; a row is spread over many programs, so that few rows fill a GPU as well.

Shapes: N = rows, V = ids the model has logits for, K = alternatives per row, C = chunks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from pipeline.kernels.sample_draw import _draw_kernel
from pipeline.kernels.sample_largest import _largest_kernel
from pipeline.kernels.sample_launch import DEFAULT_LAUNCH, SampleLaunch, SampleScratch, allocate_scratch
from pipeline.kernels.sample_scan import _combine_kernel, _select_kernel, _stats_kernel


class SampledRows(NamedTuple):
    """ids int64 [N]; logprobs float32 [N]; topk_ids int64 [N, K], topk_logprobs float32 [N, K]; or None."""

    ids: torch.Tensor
    logprobs: torch.Tensor | None
    topk_ids: torch.Tensor | None
    topk_logprobs: torch.Tensor | None


def sample_rows(
    logits: torch.Tensor,
    vocab_size: int,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    *,
    records: bool = False,
    num_topk: int = 0,
    launch: SampleLaunch = DEFAULT_LAUNCH,
) -> SampledRows:
    """logits [N, V] float32 or a half type, any row stride; ids from vocab_size on are never sampled.

    temperature (0: greedy), top_p (1: off), min_p (0: off) float32 [N]; top_k (0: off) int32 or int64 [N];
    uniform float64 [N] in [0, 1). records: log-probabilities of the sampled ids. num_topk: K alternatives
    with theirs (implies records); at most launch.listed and vocab_size.
    """
    num_rows, vocab_size = logits.shape[0], min(vocab_size, logits.shape[1])
    records = records or num_topk > 0
    assert logits.stride(1) == 1 and 0 <= num_topk <= min(vocab_size, launch.listed)
    assert uniform.dtype == torch.float64 and top_k.dtype in (torch.int32, torch.int64)
    assert all(values.dtype == torch.float32 for values in (temperature, top_p, min_p))
    parameters = (temperature, top_k, top_p, min_p, uniform)
    assert all(values.shape == (num_rows,) and values.is_contiguous() for values in parameters)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    sampled = SampledRows(
        empty(dtype=torch.int64),
        empty() if records else None,
        empty(num_topk, dtype=torch.int64) if num_topk else None,
        empty(num_topk) if num_topk else None,
    )
    if num_rows:
        scratch = allocate_scratch(num_rows, vocab_size, launch, logits.device)
        _scan(logits, vocab_size, parameters, scratch, num_topk, records, launch)
        _draw(logits, vocab_size, parameters, scratch, sampled, launch)
        if num_topk:
            _largest(logits, vocab_size, scratch, sampled, launch)
    return sampled


def _scan(
    logits: torch.Tensor,
    vocab_size: int,
    parameters: tuple[torch.Tensor, ...],
    scratch: SampleScratch,
    num_topk: int,
    records: bool,
    launch: SampleLaunch,
) -> None:
    temperature, top_k, top_p, min_p, _ = parameters
    num_rows, num_chunks = logits.shape[0], scratch.num_chunks
    row = (scratch.highest, scratch.log_total)
    chunk_stats = (scratch.maxima, scratch.sums, scratch.first, scratch.groups)
    _stats_kernel[(num_chunks, num_rows)](
        logits,
        *chunk_stats,
        logits.stride(0),
        vocab_size,
        logits.shape[1],
        RECORDS=records,
        CHUNK=launch.chunk,
        GROUPS=launch.groups,
        num_warps=launch.scan_warps,
    )
    _combine_kernel[(num_rows,)](
        *chunk_stats,
        temperature,
        top_k,
        top_p,
        *row,
        scratch.best,
        scratch.reach,
        num_chunks,
        num_topk,
        vocab_size,
        RECORDS=records,
        CHUNKS=triton.next_power_of_2(num_chunks),
        GROUPS=launch.groups,
        LISTED=launch.listed,
        num_warps=launch.row_warps,
    )
    _select_kernel[(num_chunks, num_rows)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        *row,
        scratch.reach,
        scratch.masses,
        scratch.counts,
        scratch.listed,
        logits.stride(0),
        vocab_size,
        logits.shape[1],
        RECORDS=num_topk > 0,
        CHUNK=launch.chunk,
        SEGMENT=scratch.listed.shape[2],
        num_warps=launch.scan_warps,
    )


def _draw(
    logits: torch.Tensor,
    vocab_size: int,
    parameters: tuple[torch.Tensor, ...],
    scratch: SampleScratch,
    sampled: SampledRows,
    launch: SampleLaunch,
) -> None:
    _draw_kernel[(logits.shape[0],)](
        logits,
        *parameters,
        scratch.highest,
        scratch.log_total,
        scratch.best,
        scratch.reach,
        scratch.masses,
        scratch.counts,
        scratch.listed,
        scratch.ranks,
        sampled.ids,
        scratch.log_total if sampled.logprobs is None else sampled.logprobs,
        logits.stride(0),
        vocab_size,
        logits.shape[1],
        scratch.num_chunks,
        RECORDS=sampled.logprobs is not None,
        CHUNKS=triton.next_power_of_2(scratch.num_chunks),
        CHUNK=launch.chunk,
        SEGMENT=scratch.listed.shape[2],
        TILE=launch.tile,
        BLOCK=launch.block,
        WAYS=launch.ways,
        num_warps=launch.row_warps,
    )


def _largest(
    logits: torch.Tensor, vocab_size: int, scratch: SampleScratch, sampled: SampledRows, launch: SampleLaunch
) -> None:
    assert sampled.topk_ids is not None
    num_topk = sampled.topk_ids.shape[1]
    _largest_kernel[(logits.shape[0],)](
        logits,
        scratch.highest,
        scratch.log_total,
        scratch.reach,
        scratch.counts,
        scratch.listed,
        sampled.topk_ids,
        sampled.topk_logprobs,
        logits.stride(0),
        vocab_size,
        logits.shape[1],
        scratch.num_chunks,
        num_topk,
        TOPK=triton.next_power_of_2(num_topk),
        CHUNK=launch.chunk,
        SEGMENT=scratch.listed.shape[2],
        TILE=launch.tile,
        BLOCK=launch.block,
        # Half as many: it has more to keep in registers, and hardly ever searches.
        WAYS=launch.ways // 2,
        num_warps=launch.row_warps,
    )
