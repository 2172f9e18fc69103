"""Who runs in the next step, and what becomes of the step's result.

Continuous batching with chunked prefill: every step takes the sequences that decode, then as much
prefill as the token budget allows. `schedule` may be called while the last step still computes:
its sampled tokens are counted as pending, not known. Pure Python and numpy.

Memory is promised at admission: a sequence is let in only while the free blocks cover what it and
all running ones may still come to need (`reserve` of it). Where too little was promised, the
youngest sequence is preempted: its blocks go, its tokens stay, and it is computed again later.

Shapes: R = rows (sequences) of a step, K = alternatives per token.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import numpy as np

from pipeline.engine.block_manager import hash_blocks
from pipeline.engine.block_tables import BlockTables, SharedPrefix
from pipeline.engine.sequence import Sequence, SequenceTable, TokenLogprobs
from pipeline.engine.waiting_queue import WaitingQueue
from pipeline.request import FinishReason

# A step that finds no memory for so few tokens of one row will not find it for fewer.
_FEWEST_TOKENS = 16


@dataclass(frozen=True)
class Schedule:
    """One step. Row r computes positions starts[r] … starts[r] + query_lens[r] - 1 of its slot.

    slots, starts, query_lens: int32 [R]. sampled: bool [R], the row's last position yields a token.
    carried: bool [R], the row's only input token is the one the step before samples. epochs: int64 [R].
    """

    slots: np.ndarray
    epochs: np.ndarray
    starts: np.ndarray
    query_lens: np.ndarray
    sampled: np.ndarray
    carried: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())


@dataclass
class SchedulerCounters:
    """What happened so far; tests use it to see that a feature was at work."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_shared_blocks: int = 0
    num_prefill_chunks: int = 0
    num_partial_prefill_chunks: int = 0
    num_computed_tokens: int = 0
    num_wasted_row_steps: int = 0
    num_retreats: int = 0


class Scheduler:
    def __init__(
        self,
        table: SequenceTable,
        blocks: BlockTables,
        *,
        max_num_batched_tokens: int,
        prefix_sharing: bool = True,
        reserve: float = 1.0,
        admission_batch: int = 1,
        longest_first: bool = False,
    ) -> None:
        self.table = table
        self.blocks = blocks
        self.counters = SchedulerCounters()
        self.max_num_batched_tokens = max_num_batched_tokens
        self.most_running = table.num_slots
        self._prefix_sharing = prefix_sharing
        self._reserve = reserve
        self._admission_batch = min(admission_batch, table.num_slots)
        self._waiting = WaitingQueue(longest_first)
        # After a preemption nobody is let in until somebody has ended: else both would trade blocks.
        self._admission_paused = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return self.table.num_slots - self.table.num_free_slots

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self.num_running > 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. ValueError if the whole cache could not hold it alone."""
        if not self.blocks.fits(sequence.limit):
            sizes = ", ".join(str(group.manager.num_blocks) for group in self.blocks.groups)
            raise ValueError(
                f"engine.num_blocks={sizes} holds no row of {sequence.limit} tokens "
                f"(block_size {self.blocks.block_size}): raise it or engine.kv_cache_gb, or lower "
                "sampling.max_tokens"
            )
        self._waiting.add(sequence)

    def drop_all(self) -> None:
        """Forget everything that waits or runs; the prefix cache stays."""
        self._waiting.clear()
        for slot in [s for s, sequence in enumerate(self.table.sequences) if sequence is not None]:
            self.blocks.release(slot)
            self.table.release(slot)
        self._admission_paused = False

    # ---------------------------------------------------------------- planning

    def schedule(self, wanted: Callable[[Sequence], bool] = lambda sequence: True) -> Schedule | None:
        """Plan the next step; None when nothing can run before a result comes back.

        wanted: asked of each sequence at its admission; one that is no longer wanted is forgotten.
        """
        decoding, prefilling = self._runnable()
        runnable = np.concatenate([decoding, np.array(prefilling, np.int64)])
        self.blocks.slide(runnable, self.table.scheduled[runnable])
        self.blocks.settle(decoding)
        decoding = decoding[: self.max_num_batched_tokens]
        self._grow(decoding)
        decoding = decoding[self.table.running[decoding]]
        budget = self.max_num_batched_tokens - len(decoding)
        chunks = self._continue_prefills(prefilling, budget)
        self._admit(chunks, budget - sum(chunks.values()), wanted)
        return self._commit(decoding, chunks)

    def _runnable(self) -> tuple[np.ndarray, list[int]]:
        """Slots with one token to compute, and those with more, the oldest first."""
        t = self.table
        virtual = t.length + t.pending
        active = t.running & (virtual < t.limit) & (t.scheduled < virtual)
        single = active & (virtual - t.scheduled == 1)
        prefilling = np.flatnonzero(active & ~single)
        decoding = np.flatnonzero(single)
        if len(decoding) > self.max_num_batched_tokens:
            # Fairness when the budget is smaller than the batch: those furthest behind go first.
            decoding = decoding[np.argsort(t.scheduled[decoding] - t.num_prompt[decoding], kind="stable")]
        return decoding, prefilling[np.argsort(t.admitted[prefilling])].tolist()

    def _grow(self, slots: np.ndarray) -> None:
        """One more block for each slot whose next position lies past its last block."""
        t = self.table
        full = slots[t.scheduled[slots] >= self.blocks.num_blocks[slots] * self.blocks.block_size]
        for slot in full[np.argsort(t.admitted[full])].tolist():
            while t.running[slot] and not self.blocks.cover(slot, int(t.scheduled[slot]) + 1):
                self._preempt_youngest()

    def _continue_prefills(self, slots: list[int], budget: int) -> dict[int, int]:
        t = self.table
        chunks: dict[int, int] = {}
        for slot in slots:
            chunk = min(int(t.length[slot] + t.pending[slot] - t.scheduled[slot]), budget)
            if chunk <= 0:
                break
            # Only memory left over by others is used: a prefill in progress waits rather than preempts.
            if t.running[slot] and self.blocks.cover(slot, int(t.scheduled[slot]) + chunk):
                chunks[slot] = chunk
                budget -= chunk
        if slots and not chunks and not self._anyone_else_runs(slots):
            return self._unblock_prefill(slots[0], budget)
        return chunks

    def _anyone_else_runs(self, slots: ListOf[int]) -> bool:
        return int(self.table.running.sum()) > sum(bool(self.table.running[s]) for s in slots)

    def _unblock_prefill(self, slot: int, budget: int) -> dict[int, int]:
        """Several half-done prefills hold all memory: the oldest gets on at the youngest's expense."""
        t = self.table
        chunk = min(int(t.length[slot] + t.pending[slot] - t.scheduled[slot]), budget)
        while t.running[slot] and chunk > 0:
            if self.blocks.cover(slot, int(t.scheduled[slot]) + chunk):
                return {slot: chunk}
            self._preempt_youngest()
        return {}

    def _admit(self, chunks: dict[int, int], budget: int, wanted: Callable[[Sequence], bool]) -> None:
        """Let waiting sequences in, first come first served, while slots, tokens and memory last."""
        t = self.table
        # Rows are let in several at a time: each step with a prompt in it is dearer than one without.
        if not chunks and t.num_free_slots < min(self._admission_batch, len(self._waiting)):
            return
        while self._waiting and t.num_free_slots and self.num_running < self.most_running and budget > 0:
            if self._admission_paused and t.running.any():
                return
            sequence = self._waiting.first
            prefix, promised = self._shared_prefix(sequence), self._promise(sequence)
            known = len(sequence.tokens)
            if not self.blocks.can_admit(promised, known, prefix, t.running) and t.running.any():
                return
            self._waiting.pop()
            if not wanted(sequence):
                continue
            slot = self._place(sequence, prefix, promised)
            chunk = min(int(t.length[slot] - t.scheduled[slot]), budget)
            taken = self.blocks.cover(slot, int(t.scheduled[slot]) + chunk)
            assert taken, "admission promised blocks that are not there"
            chunks[slot] = chunk
            budget -= chunk
            # Now, not after the step: a twin admitted beside it finds its K/V written before it reads.
            self._register(slot, int(t.scheduled[slot]) + chunk)

    def _shared_prefix(self, sequence: Sequence) -> SharedPrefix:
        """What of the sequence's beginning is in memory; its last token is always computed."""
        if not self._prefix_sharing:
            return self.blocks.find_prefix([])
        reusable = (len(sequence.tokens) - 1) // self.blocks.block_size
        if len(sequence.block_hashes) < reusable:
            sequence.block_hashes[:] = hash_blocks(
                sequence.tokens, self.blocks.block_size, sequence.block_hashes, reusable
            )
        return self.blocks.find_prefix(sequence.block_hashes[:reusable])

    def _promise(self, sequence: Sequence) -> int:
        """Tokens to set memory aside for: what it has, and `reserve` of what it may still become."""
        known = len(sequence.tokens)
        return known + int(self._reserve * (sequence.limit - known))

    def _place(self, sequence: Sequence, prefix: SharedPrefix, promised: int) -> int:
        slot = self.table.place(sequence)
        self.blocks.admit(slot, promised, len(sequence.tokens), prefix)
        self.table.scheduled[slot] = prefix.num_blocks * self.blocks.block_size
        self.counters.num_shared_blocks += prefix.num_blocks
        return slot

    def _register(self, slot: int, num_scheduled: int) -> None:
        """Name the slot's full blocks below num_scheduled by their hashes, for others to share."""
        if not self._prefix_sharing:
            return
        sequence = self.table.sequences[slot]
        assert sequence is not None
        self.blocks.register(slot, sequence.block_hashes, num_scheduled)

    def _commit(self, decoding: np.ndarray, chunks: dict[int, int]) -> Schedule | None:
        """Turn the choice into arrays and count it as scheduled."""
        t = self.table
        chunks = {slot: n for slot, n in chunks.items() if t.running[slot]}
        slots = np.concatenate([decoding, np.fromiter(chunks, np.int64, len(chunks))]).astype(np.int32)
        if not len(slots):
            return None
        query_lens = np.ones(len(slots), np.int32)
        query_lens[len(decoding) :] = list(chunks.values())
        starts = t.scheduled[slots].copy()
        # A carried row computes the position of a token that the host does not know yet.
        carried = starts >= t.length[slots]
        t.scheduled[slots] += query_lens
        for slot in chunks:
            self._register(slot, int(t.scheduled[slot]))
        sampled = t.scheduled[slots] == t.length[slots] + t.pending[slots]
        t.pending[slots] += sampled
        self._count(query_lens, sampled, len(chunks))
        return Schedule(slots, t.epoch[slots].copy(), starts, query_lens, sampled, carried)

    def _count(self, query_lens: np.ndarray, sampled: np.ndarray, num_chunks: int) -> None:
        c = self.counters
        c.num_steps += 1
        c.num_computed_tokens += int(query_lens.sum())
        c.num_prefill_chunks += num_chunks
        c.num_partial_prefill_chunks += int((~sampled).sum())

    # ---------------------------------------------------------------- preemption

    def _preempt_youngest(self) -> None:
        t = self.table
        running = np.flatnonzero(t.running)
        slot = int(running[np.argmax(t.admitted[running])])
        self.counters.num_preemptions += 1
        self._admission_paused = True
        self._name_generated_blocks(slot)
        self.blocks.release(slot)
        t.running[slot] = False
        if not t.pending[slot]:
            self._return(slot)
        # Otherwise its token is still on the way: the slot drains until `update` brings it.

    def _name_generated_blocks(self, slot: int) -> None:
        """Let the preempted find its own blocks again, if they are still unused when it returns."""
        t, sequence = self.table, self.table.sequences[slot]
        if not self._prefix_sharing or sequence is None:
            return
        known = min(int(t.length[slot]), int(t.scheduled[slot]))
        # The list is shared between the samples of a request; generated tokens are this one's alone.
        sequence.block_hashes = hash_blocks(
            t.tokens[slot, :known], self.blocks.block_size, sequence.block_hashes
        )
        self._register(slot, known)

    def _return(self, slot: int) -> None:
        """Back to the front of the queue, with all tokens known so far."""
        self.blocks.release(slot)
        self._waiting.put_back(self.table.release(slot))

    def retreat(self) -> bool:
        """All that runs goes back to wait, as far as it is known here; steps are half as large afterwards.

        False, and nothing is done, if they cannot get smaller.
        """
        t = self.table
        if self.most_running <= 1 and self.max_num_batched_tokens <= _FEWEST_TOKENS:
            return False
        slots = [slot for slot, sequence in enumerate(t.sequences) if sequence is not None]
        self.most_running = max(1, min(self.most_running, len(slots)) // 2)
        self.max_num_batched_tokens = max(_FEWEST_TOKENS, self.max_num_batched_tokens // 2)
        # What was on its way is lost; the oldest goes on first.
        for slot in sorted(slots, key=lambda slot: -int(t.admitted[slot])):
            t.pending[slot] = 0
            self._return(slot)
        # Blocks are named before the step that fills them.
        self.blocks.forget_prefixes()
        self._admission_paused = False
        self.counters.num_retreats += 1
        return True

    # ---------------------------------------------------------------- results

    def update(
        self, schedule: Schedule, ids: np.ndarray, logprobs: TokenLogprobs | None = None
    ) -> list[Sequence]:
        """Take a step's sampled ids, int32 [number of sampled rows]; return the sequences that ended."""
        t = self.table
        slots = schedule.slots[schedule.sampled]
        current = t.epoch[slots] == schedule.epochs[schedule.sampled]
        # The others ended one step ago, by a token that was not known when this step was planned.
        self.counters.num_wasted_row_steps += int((~current).sum())
        slots, ids = slots[current], ids[current]
        if logprobs is not None and not current.all():
            logprobs = TokenLogprobs(
                logprobs.logprobs[current], logprobs.topk_ids[current], logprobs.topk_logprobs[current]
            )
        t.append(slots, ids, logprobs)
        finished = [self._finish(slot, reason) for slot, reason in self._ended(slots, ids)]
        for slot in slots[~t.running[slots]].tolist():
            if t.sequences[slot] is not None:
                self._return(slot)
        return finished

    def _ended(self, slots: np.ndarray, ids: np.ndarray) -> list[tuple[int, FinishReason]]:
        t = self.table
        stopped = (t.stop_ids[slots] == ids[:, None]).any(axis=1) & (t.length[slots] >= t.min_length[slots])
        for r in np.flatnonzero(t.has_stop_strings[slots] & ~stopped).tolist():
            sequence = t.sequences[slots[r]]
            assert sequence is not None and sequence.matcher is not None
            stopped[r] = sequence.matcher.feed(int(ids[r]), sequence.request.params.min_tokens)
        over = stopped | (t.length[slots] >= t.limit[slots])
        return [
            (int(slots[r]), FinishReason.STOP if stopped[r] else FinishReason.LENGTH)
            for r in np.flatnonzero(over).tolist()
        ]

    def _finish(self, slot: int, reason: FinishReason) -> Sequence:
        self.blocks.release(slot)
        self._admission_paused = False
        sequence = self.table.release(slot)
        sequence.finish_reason = reason
        return sequence
