"""Runs one step of the model: inputs in, sampled ids out.

Knows tensors and the model; refuses to know sequences and the order of steps. In `bitwise`
determinism, token and row counts are padded to sizes at which this machine's matrix products give
each row the same bits; they are found by trying (`find_invariant_sizes`).

Shapes: T = tokens of a step, N = sampled rows, S = sequence slots, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pipeline.engine.batch import StepInputs
from pipeline.engine.block_manager import NULL_BLOCK
from pipeline.engine.invariant_sizes import CANDIDATE_SIZES, find_invariant_sizes
from pipeline.engine.kv_cache import KVCache
from pipeline.engine.sampler import Sampled, Sampler
from pipeline.models.attention import CpuAttentionContext, GroupContext
from pipeline.models.cpu_attention import plan_tensors
from pipeline.models.layers import logits_of_equal_rows
from pipeline.models.load import LoadedModel


@dataclass(frozen=True)
class StepOutput:
    """A step's result on the host: ids int32 [N]; logprobs and alternatives as the sampler gives them."""

    ids: np.ndarray
    logprobs: np.ndarray | None
    topk_ids: np.ndarray | None
    topk_logprobs: np.ndarray | None


class ModelRunner:
    """model, cache and sampler of one device, and the last id sampled for each sequence slot."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: KVCache,
        sampler: Sampler,
        *,
        num_slots: int,
        max_num_batched_tokens: int,
        bitwise: bool,
    ) -> None:
        self._loaded = loaded
        self._cache = cache
        self._sampler = sampler
        self._device = loaded.device
        # Carry-over: read by the step after the one that writes it, without a detour over the host.
        self._last_ids = torch.zeros(num_slots, dtype=torch.int64, device=self._device)
        a = loaded.architecture
        self._group_size = a.num_heads // a.num_kv_heads
        self._sizes = self._usable_sizes(max_num_batched_tokens) if bitwise else None
        self._forward = loaded.model

    @property
    def padded_sizes(self) -> tuple[int, ...] | None:
        """Row counts in use under bitwise determinism; None where nothing is padded."""
        return self._sizes

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> StepOutput:
        """Compute one step. Sampled ids stay on the device too, for the next step's carry-over."""
        input_ids = torch.from_numpy(inputs.input_ids).to(self._device)
        if len(inputs.carry_tokens):
            slots = torch.from_numpy(inputs.carry_slots).to(self._device)
            input_ids[torch.from_numpy(inputs.carry_tokens).to(self._device)] = self._last_ids[slots]
        logits = self._logits(input_ids, inputs)
        if logits is None:
            return StepOutput(np.empty(0, np.int32), None, None, None)
        last_ids = input_ids[torch.from_numpy(inputs.logits_index).to(self._device)]
        sampled = self._sampler(logits, inputs.sampling, last_ids)
        self._last_ids[torch.from_numpy(inputs.sampling.slots).to(self._device)] = sampled.ids
        return _to_host(sampled)

    def _logits(self, input_ids: torch.Tensor, inputs: StepInputs) -> torch.Tensor | None:
        """Logits [N, V] of the sampled rows; None if no row reaches the end of what is known."""
        num_tokens, num_sampled = len(input_ids), len(inputs.logits_index)
        padding = self._padded(num_tokens) - num_tokens
        context = CpuAttentionContext(
            self._cache.keys,
            self._cache.values,
            {window: self._group(inputs, window, padding) for window in inputs.groups},
        )
        # A step of prompt chunks alone still wants one row: the model cannot give none.
        wanted = torch.from_numpy(inputs.logits_index) if num_sampled else torch.zeros(1, dtype=torch.int64)
        wanted = _pad(wanted, self._padded(len(wanted)) - len(wanted), 0)
        logits = self._call(
            _pad(input_ids, padding, 0), _pad(torch.from_numpy(inputs.positions), padding, 0), context, wanted
        )
        return logits[:num_sampled] if num_sampled else None

    def _call(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: CpuAttentionContext,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        return self._forward(
            input_ids=input_ids[None],
            position_ids=positions[None].to(self._device),
            use_cache=False,
            logits_to_keep=wanted.to(self._device),
            tokenmill=context,
        ).logits[0]

    def _group(self, inputs: StepInputs, window: int | None, padding: int) -> GroupContext:
        group = inputs.groups[window]
        plans = plan_tensors(
            inputs.starts,
            inputs.query_lens,
            group.block_tables,
            block_size=self._cache.block_size,
            group_size=self._group_size,
            window=window,
        )
        slot_mapping = _pad(torch.from_numpy(group.slot_mapping), padding, NULL_BLOCK)
        return GroupContext(slot_mapping.to(self._device), plans)

    def _padded(self, count: int) -> int:
        if self._sizes is None:
            return count
        return next((size for size in self._sizes if size >= count), count)

    # ---------------------------------------------------------------- at load

    def _usable_sizes(self, max_num_batched_tokens: int) -> tuple[int, ...]:
        """Candidate sizes, up to the first that holds a full step, at which all rows get the same bits."""
        if max_num_batched_tokens > CANDIDATE_SIZES[-1]:
            raise ValueError(
                f"engine.max_num_batched_tokens={max_num_batched_tokens} is above {CANDIDATE_SIZES[-1]}, "
                "the largest step that bitwise determinism is tried at: lower it, or use "
                "engine.determinism=fast"
            )
        largest = next(size for size in CANDIDATE_SIZES if size >= max_num_batched_tokens)
        candidates = [size for size in CANDIDATE_SIZES if size <= largest]
        sizes = find_invariant_sizes(candidates, lambda size: logits_of_equal_rows(self._loaded, size))
        if not sizes or sizes[-1] < max_num_batched_tokens:
            raise ValueError(
                "engine.determinism=bitwise: on this machine a row's bits depend on how many rows stand "
                f"beside it (sizes that agree: {sizes or 'none'}, needed up to {max_num_batched_tokens}): "
                "lower engine.max_num_batched_tokens, or use engine.determinism=fast"
            )
        return sizes


def _pad(values: torch.Tensor, count: int, fill: int) -> torch.Tensor:
    return torch.cat([values, values.new_full((count,), fill)]) if count else values


def _to_host(sampled: Sampled) -> StepOutput:
    def host(tensor: torch.Tensor | None, dtype: type) -> np.ndarray | None:
        return None if tensor is None else tensor.cpu().numpy().astype(dtype)

    ids = host(sampled.ids, np.int32)
    assert ids is not None
    return StepOutput(
        ids,
        host(sampled.logprobs, np.float32),
        host(sampled.topk_ids, np.int32),
        host(sampled.topk_logprobs, np.float32),
    )
