"""A step's attention on a GPU: Triton kernels over the paged cache.

Decoding rows come first in a step and go through the split-KV kernel, the prompt chunks behind
them through the prefill kernel. Everything a step needs lies in tensors that were there before, so
that the calls can be captured in a CUDA graph. Knows kernels; refuses to know sequences.

Shapes: T = tokens, R = rows, Hq = query heads, H = KV heads, D = head width, N = blocks,
P = block size, B = blocks of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeline.kernels.decode_plan import DecodeWorkspace, plan_decode
from pipeline.kernels.kv_write import write_kv
from pipeline.kernels.paged_decode import paged_decode
from pipeline.kernels.paged_prefill import paged_prefill
from pipeline.models.attention import AttentionOptions


@dataclass(frozen=True)
class CudaGroup:
    """One layer group's part of a step. slot_mapping: int64 [T], negative for padding. block_tables:
    int32 [R, B]. workspace: what the decode kernel writes beside its output."""

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    workspace: DecodeWorkspace


@dataclass(frozen=True)
class CudaAttentionContext:
    """A step on a GPU. keys, values: per layer [N, H, P, D]. groups: by sliding window.

    num_decode: rows of one token, the first ones. context_lens: int32 [R], their new token included.
    query_start_loc: int32 [R + 1], where each row's tokens begin. starts: int32 [R], their first position.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    groups: dict[int | None, CudaGroup]
    num_decode: int
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    starts: torch.Tensor

    def plan(self) -> None:
        """Cut the decoding rows into splits, once for all layers of each group."""
        if self.num_decode:
            for window, group in self.groups.items():
                plan_decode(self.context_lens[: self.num_decode], group.workspace, window)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        slots = self.groups[options.window].slot_mapping
        write_kv(key, value, self.keys[layer], self.values[layer], slots)
        return self.attend_written(layer, query, options)

    def attend_written(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """Attend where the step's keys and values are in the cache already: query, result [T, Hq, D]."""
        group, n = self.groups[options.window], self.num_decode
        keys, values = self.keys[layer], self.values[layer]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if n:
            paged_decode(
                query[:n],
                keys,
                values,
                group.block_tables[:n],
                self.context_lens[:n],
                scale=options.scale,
                window=options.window,
                softcap=options.softcap,
                sinks=options.sinks,
                workspace=group.workspace,
                planned=True,
                out=out[:n],
            )
        if len(query) > n:
            paged_prefill(
                query,
                keys,
                values,
                group.block_tables[n:],
                self.query_start_loc[n:],
                self.starts[n:],
                scale=options.scale,
                window=options.window,
                softcap=options.softcap,
                sinks=options.sinks,
                out=out,
            )
        return out
