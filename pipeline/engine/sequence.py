"""A sequence in flight, and the table that holds the numbers of all of them.

`Sequence` is one sample of one request. `SequenceTable` keeps what every step reads and writes as
numpy arrays with one row per sequence slot, so that a step costs a few array operations instead of
a Python loop over the batch. Knows tokens and limits; refuses to know blocks' owners and tensors.

Shapes: S = sequence slots, C = completion tokens, K = alternatives per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pipeline.engine.philox import sequence_key
from pipeline.engine.stop_strings import StopStringMatcher
from pipeline.request import FinishReason, Request, SamplingParams

# Pads the rows of `stop_ids`; no token has it.
NO_TOKEN = -1


@dataclass
class TokenLogprobs:
    """What goes with some tokens N: logprobs float32 [N], topk_ids int32 and topk_logprobs [N, K]."""

    logprobs: np.ndarray
    topk_ids: np.ndarray
    topk_logprobs: np.ndarray


@dataclass
class Sequence:
    """One sample of one request on its way. `tokens`: prompt and completion so far, int32."""

    request: Request
    sample: int
    tokens: np.ndarray
    limit: int
    stop_ids: np.ndarray
    philox_key: np.ndarray
    matcher: StopStringMatcher | None = None
    # Shared by the samples of one request and extended when a preempted sequence leaves its blocks.
    block_hashes: list[bytes] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)


def make_sequence(
    request: Request,
    sample: int,
    *,
    seed: int,
    max_model_len: int,
    eos_ids: tuple[int, ...],
    matcher: StopStringMatcher | None,
    block_hashes: list[bytes],
) -> Sequence:
    """A request's sample, ready to wait for admission."""
    params = request.params
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_ids))
    return Sequence(
        request=request,
        sample=sample,
        tokens=np.asarray(request.prompt_ids, np.int32),
        limit=min(len(request.prompt_ids) + params.max_tokens, max_model_len),
        stop_ids=np.array(sorted(stop_ids), np.int32),
        philox_key=sequence_key(seed, request.key.file, request.key.row, sample),
        matcher=matcher,
        block_hashes=block_hashes,
    )


class SequenceTable:
    """Arrays over the sequence slots.

    length: tokens known on the host. scheduled: positions whose K/V is computed or on its way.
    pending: tokens being sampled by a step whose result is not back. limit: tokens at which the
    sequence ends. epoch: grows whenever a slot changes hands, so that a late result finds out
    that it is nobody's.
    """

    def __init__(self, num_slots: int, num_topk: int = 0) -> None:
        self.num_slots = num_slots
        self.num_topk = num_topk
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.epoch = np.zeros(num_slots, np.int64)
        self.running = np.zeros(num_slots, bool)
        self.admitted = np.zeros(num_slots, np.int64)
        self.length = np.zeros(num_slots, np.int32)
        self.scheduled = np.zeros(num_slots, np.int32)
        self.pending = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.tokens = np.zeros((num_slots, 256), np.int32)
        self.philox_keys = np.zeros((num_slots, 2), np.uint32)
        self.stop_ids = np.full((num_slots, 1), NO_TOKEN, np.int32)
        self.has_stop_strings = np.zeros(num_slots, bool)
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int32)
        self.top_p = np.ones(num_slots, np.float32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.min_length = np.zeros(num_slots, np.int32)
        self.repetition_penalty = np.ones(num_slots, np.float32)
        self.presence_penalty = np.zeros(num_slots, np.float32)
        self.frequency_penalty = np.zeros(num_slots, np.float32)
        # Rows whose logits depend on their tokens, and rows with a bias or bad words.
        self.has_history = np.zeros(num_slots, bool)
        self.has_edits = np.zeros(num_slots, bool)
        # Grown to the longest completion in flight, not to the longest possible: memory is
        # slots x completion x (4 + 8 K) bytes.
        self.logprobs = np.zeros((num_slots, 0), np.float32)
        self.topk_ids = np.zeros((num_slots, 0, num_topk), np.int32)
        self.topk_logprobs = np.zeros((num_slots, 0, num_topk), np.float32)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._num_admitted = 0

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def params_of(self, slot: int) -> SamplingParams:
        sequence = self.sequences[slot]
        assert sequence is not None
        return sequence.request.params

    def place(self, sequence: Sequence) -> int:
        """Give the sequence a slot and copy its numbers in."""
        slot = self._free_slots.pop()
        params, known = sequence.request.params, len(sequence.tokens)
        self.sequences[slot] = sequence
        self._num_admitted += 1
        self.admitted[slot] = self._num_admitted
        self.running[slot] = True
        self.length[slot] = known
        self.scheduled[slot] = self.pending[slot] = 0
        self.limit[slot] = sequence.limit
        self.num_prompt[slot] = sequence.num_prompt_tokens
        self.min_length[slot] = sequence.num_prompt_tokens + params.min_tokens
        self.tokens = _widened(self.tokens, sequence.limit)
        self.tokens[slot, :known] = sequence.tokens
        self.stop_ids = _widened(self.stop_ids, len(sequence.stop_ids), fill=NO_TOKEN)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(sequence.stop_ids)] = sequence.stop_ids
        self.philox_keys[slot] = sequence.philox_key
        self.has_stop_strings[slot] = sequence.matcher is not None
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k or 0
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.has_history[slot] = params.needs_history
        self.has_edits[slot] = bool(params.logit_bias or params.bad_words_ids)
        if sequence.logprobs is not None:
            places = np.arange(known - sequence.num_prompt_tokens)
            self._store_logprobs(np.full_like(places, slot), places, sequence.logprobs)
        return slot

    def append(self, slots: np.ndarray, ids: np.ndarray, logprobs: TokenLogprobs | None) -> None:
        """Add one sampled id [R] to each of the slots [R], which must differ, and what goes with it."""
        if logprobs is not None:
            self._store_logprobs(slots, self.length[slots] - self.num_prompt[slots], logprobs)
        self.tokens[slots, self.length[slots]] = ids
        self.length[slots] += 1
        self.pending[slots] -= 1

    def _store_logprobs(self, slots: np.ndarray, places: np.ndarray, values: TokenLogprobs) -> None:
        width = int(places.max(initial=-1)) + 1
        self.logprobs = _widened(self.logprobs, width)
        self.logprobs[slots, places] = values.logprobs
        if self.num_topk:
            self.topk_ids = _widened(self.topk_ids, width)
            self.topk_logprobs = _widened(self.topk_logprobs, width)
            self.topk_ids[slots, places] = values.topk_ids
            self.topk_logprobs[slots, places] = values.topk_logprobs

    def release(self, slot: int) -> Sequence:
        """Take the sequence, with all it has so far, out of its slot."""
        sequence = self.sequences[slot]
        assert sequence is not None
        length, prompt = int(self.length[slot]), int(self.num_prompt[slot])
        sequence.tokens = self.tokens[slot, :length].copy()
        params = sequence.request.params
        if params.logprobs or params.top_logprobs:
            count = length - prompt
            sequence.logprobs = TokenLogprobs(
                self.logprobs[slot, :count].copy(),
                self.topk_ids[slot, :count].copy(),
                self.topk_logprobs[slot, :count].copy(),
            )
        self.sequences[slot] = None
        self.running[slot] = False
        self.epoch[slot] += 1
        self._free_slots.append(slot)
        return sequence


def _widened(array: np.ndarray, width: int, fill: int = 0) -> np.ndarray:
    """The array with at least `width` columns (axis 1), doubling so that growth stays rare."""
    if array.shape[1] >= width:
        return array
    grown = np.full((array.shape[0], max(width, 2 * array.shape[1]), *array.shape[2:]), fill, array.dtype)
    grown[:, : array.shape[1]] = array
    return grown
