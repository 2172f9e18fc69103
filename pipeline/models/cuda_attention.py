"""A step's attention on a GPU: Triton kernels over the paged cache.

Decoding rows come first in a step and go through the split-KV kernel, the prompt chunks behind
them through the prefill kernel or through FlashAttention-3. With num_decode = 0 every row is a prompt
chunk, of one token perhaps. Everything a step needs lies in tensors that were there before, so that
the calls can be captured in a CUDA graph. Knows kernels; refuses to know sequences.

Shapes: T = tokens, R = rows, Hq = query heads, H = KV heads, D = head width, N = blocks,
P = block size, B = blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from pipeline.kernels.decode_plan import DecodeWorkspace, plan_decode
from pipeline.kernels.flash_attention import flash_prefill
from pipeline.kernels.kv_write import write_kv
from pipeline.kernels.paged_decode import paged_decode
from pipeline.kernels.paged_prefill import paged_prefill
from pipeline.models.attention import AttentionOptions


class PromptKernel(str, Enum):
    """What prompt chunks are computed with."""

    triton = "triton"
    flash_attention_3 = "flash_attention_3"


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
    prompt_kernels: by sliding window; Triton's own where nothing is said.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    groups: dict[int | None, CudaGroup]
    num_decode: int
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    starts: torch.Tensor
    prompt_kernels: Mapping[int | None, PromptKernel] = field(default_factory=dict)

    def prompt_kernel(self, window: int | None) -> PromptKernel:
        return self.prompt_kernels.get(window, PromptKernel.triton)

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
        n = self.num_decode
        if len(query) > n:
            out = self._attend_prompts(layer, query, options)
        else:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        if n:
            group = self.groups[options.window]
            paged_decode(
                query[:n],
                self.keys[layer],
                self.values[layer],
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
        return out

    def _attend_prompts(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        """The rows behind the decoding ones: [T, Hq, D], of which those rows' tokens are written."""
        n = self.num_decode
        keys, values = self.keys[layer], self.values[layer]
        tables, start_loc = self.groups[options.window].block_tables[n:], self.query_start_loc[n:]
        if self.prompt_kernel(options.window) is PromptKernel.flash_attention_3:
            return flash_prefill(
                query,
                keys,
                values,
                tables,
                start_loc,
                self.context_lens[n:],
                scale=options.scale,
                window=options.window,
                softcap=options.softcap,
            )
        return paged_prefill(
            query,
            keys,
            values,
            tables,
            start_loc,
            self.starts[n:],
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=options.sinks,
            out=torch.empty(query.shape, dtype=query.dtype, device=query.device),
        )
