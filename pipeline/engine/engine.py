"""The engine: requests in, completions out, batch N+1 prepared while batch N computes.

Each turn of the loop plans a step, launches it, and only then takes in the result of the step
before. Tokens sampled by that step are not known while the next is planned; they are carried over
on the device. Knows the loop; each of its parts knows the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.config import Determinism, EngineConfig, EngineMode, ModelConfig
from pipeline.engine.batch import StepInputs, build_inputs
from pipeline.engine.block_manager import BlockManager
from pipeline.engine.kv_cache import KVCache, KVShape, num_blocks_for
from pipeline.engine.model_runner import ModelRunner, StepOutput
from pipeline.engine.sampler import Sampler
from pipeline.engine.scheduler import Schedule, Scheduler, SchedulerCounters
from pipeline.engine.sequence import Sequence, SequenceTable, TokenLogprobs, make_sequence
from pipeline.engine.slots import BatchSlot, BatchSlots
from pipeline.engine.stop_strings import StopStringMatcher
from pipeline.models.load import LoadedModel, load_model, load_tokenizer
from pipeline.request import Completion, FinishReason, Refusal, Request, RowError


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. kv_use: share of the KV blocks owned. busy_seconds: time spent in steps."""

    num_running: int
    num_waiting: int
    kv_use: float
    prompt_tokens: int
    completion_tokens: int
    busy_seconds: float
    counters: SchedulerCounters


class Engine:
    """Generates completions for a stream of requests.

    Completions come as they finish, not in the order of the requests. What a row becomes depends
    on (seed, row key, sample) and its prompt alone; under `bitwise` determinism to the last bit.

    Raises ValueError for settings that cannot work, naming key, value and remedy.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        *,
        seed: int = 0,
        logprobs: bool = False,
        num_topk: int = 0,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.loaded = loaded
        self._seed = seed
        if num_topk > loaded.vocab_size:
            raise ValueError(f"output.topk={num_topk} exceeds the vocabulary of {loaded.vocab_size} ids")
        shape = kv_shape(loaded)
        num_blocks = config.num_blocks or num_blocks_for(shape, config.block_size, config.kv_cache_gb)
        # More than every slot at full length is memory for nothing.
        longest = -(-loaded.max_model_len // config.block_size)
        if config.num_blocks is None:
            num_blocks = min(num_blocks, 2 + 2 * config.max_num_seqs * longest)
        blocks = BlockManager(num_blocks, config.block_size)
        self._table = SequenceTable(config.max_num_seqs, min(longest, num_blocks), num_topk)
        self._scheduler = Scheduler(
            self._table,
            blocks,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefix_sharing=config.prefix_sharing,
            reserve=config.reserve,
        )
        self._records_logprobs = logprobs or num_topk > 0
        self._runner = ModelRunner(
            loaded,
            KVCache(shape, num_blocks, config.block_size, loaded.device),
            Sampler(loaded.vocab_size, logprobs=logprobs, num_topk=num_topk),
            num_slots=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            bitwise=resolve_determinism(config, loaded) is Determinism.bitwise,
            compile=config.compile,
        )
        self._slots: BatchSlots[StepInputs, StepOutput] | None = None
        self._busy_before = 0.0
        self._prompt_tokens = 0
        self._completion_tokens = 0

    @classmethod
    def from_pretrained(
        cls, path: str, engine: EngineConfig | None = None, *, seed: int = 0, **model: Any
    ) -> Engine:
        """Load a model folder (or hub name) with its tokenizer; `model` are fields of ModelConfig."""
        config = ModelConfig(path=path, **model)
        return cls(load_model(config, load_tokenizer(config)), engine, seed=seed)

    @property
    def stats(self) -> EngineStats:
        blocks = self._scheduler.blocks
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_use=1 - blocks.num_free / blocks.capacity,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            busy_seconds=self._busy_before + (self._slots.busy_seconds if self._slots else 0.0),
            counters=replace(self._scheduler.counters),
        )

    def generate(
        self, requests: Iterable[Request], should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Completion]:
        """Yield every sample of every request as it finishes.

        requests are pulled lazily, a batch ahead. should_stop is asked once a step; when it says yes,
        or the iterator is closed early, what is in flight is dropped and the engine can be used again.
        One generate at a time: a second raises RuntimeError.
        """
        if self._slots is not None:
            raise RuntimeError("the engine is already generating: exhaust or close that iterator first")
        self._slots = BatchSlots(self._runner.run, overlap=self.config.mode is EngineMode.async_)
        try:
            with self._slots:
                yield from self._loop(_Feed(requests), should_stop)
        finally:
            self._busy_before += self._slots.busy_seconds
            self._slots = None
            self._scheduler.drop_all()

    def _loop(self, feed: _Feed, should_stop: Callable[[], bool]) -> Iterator[Completion]:
        assert self._slots is not None
        in_flight: tuple[Schedule, BatchSlot[StepInputs, StepOutput]] | None = None
        while not should_stop():
            yield from self._take_in(feed)
            schedule = self._scheduler.schedule()
            launched = None
            if schedule is not None:
                inputs = build_inputs(schedule, self._table, self.config.block_size)
                launched = (schedule, self._slots.launch(inputs))
            if self.config.mode is EngineMode.sync:
                in_flight, launched = launched, None
            if in_flight is not None:
                yield from self._take_result(*in_flight)
            in_flight = launched
            if in_flight is None and not self._scheduler.has_work and feed.exhausted:
                return

    def _take_in(self, feed: _Feed) -> Iterator[Completion]:
        """Pull requests until a batch of sequences waits; hand back those that cannot run."""
        while self._scheduler.num_waiting < self.config.max_num_seqs:
            request = feed.next(may_wait=not self._scheduler.has_work)
            if request is None:
                return
            refusal = request.refusal or self._enqueue(request)
            if refusal is not None:
                for sample in request.samples:
                    yield Completion(request, sample, refusal.finish_reason, error=refusal.error)

    def _enqueue(self, request: Request) -> Refusal | None:
        """Queue each sample of a request, or say why not."""
        length, limit = len(request.prompt_ids), self.loaded.max_model_len
        if not 0 < length < limit:
            message = f"the prompt has {length} tokens; model.max_model_len={limit} allows 1 to {limit - 1}"
            return Refusal(
                FinishReason.ERROR, RowError("prompt_too_long" if length else "prompt_invalid", message)
            )
        hashes: list[bytes] = []
        try:
            for sample in request.samples:
                self._scheduler.add(self._sequence(request, sample, hashes))
        except ValueError as error:
            return Refusal(FinishReason.ERROR, RowError("row_exceeds_kv_cache", str(error)))
        self._prompt_tokens += length * len(request.samples)
        return None

    def _sequence(self, request: Request, sample: int, hashes: list[bytes]) -> Sequence:
        return make_sequence(
            request,
            sample,
            seed=self._seed,
            max_model_len=self.loaded.max_model_len,
            eos_ids=self.loaded.eos_ids,
            matcher=self._matcher(request.params.stop),
            block_hashes=hashes,
        )

    def _matcher(self, stop: tuple[str, ...]) -> StopStringMatcher | None:
        if not stop:
            return None
        if self.loaded.tokenizer is None:
            raise ValueError("sampling.stop needs a tokenizer to find strings: load the model with one")
        return StopStringMatcher(stop, self._decode)

    def _decode(self, ids: list[int]) -> str:
        return self.loaded.tokenizer.decode(ids, skip_special_tokens=True)

    def _take_result(
        self, schedule: Schedule, slot: BatchSlot[StepInputs, StepOutput]
    ) -> Iterator[Completion]:
        output = slot.result()
        logprobs = None
        if self._records_logprobs and output.logprobs is not None:
            none = np.empty((len(output.ids), 0))
            logprobs = TokenLogprobs(
                output.logprobs,
                none if output.topk_ids is None else output.topk_ids,
                none if output.topk_logprobs is None else output.topk_logprobs,
            )
        for sequence in self._scheduler.update(schedule, output.ids, logprobs):
            yield self._completion(sequence)

    def _completion(self, sequence: Sequence) -> Completion:
        assert sequence.finish_reason is not None
        ids = sequence.tokens[sequence.num_prompt_tokens :]
        self._completion_tokens += len(ids)
        recorded, topk = sequence.logprobs, sequence.request.params.top_logprobs
        return Completion(
            request=sequence.request,
            sample=sequence.sample,
            finish_reason=sequence.finish_reason,
            token_ids=ids,
            text=self._text(sequence, ids),
            logprobs=recorded.logprobs if recorded else None,
            topk_ids=recorded.topk_ids[:, :topk] if recorded and topk else None,
            topk_logprobs=recorded.topk_logprobs[:, :topk] if recorded and topk else None,
        )

    def _text(self, sequence: Sequence, ids: np.ndarray) -> str | None:
        """The completion as text, without the stop that ended it."""
        if self.loaded.tokenizer is None:
            return None
        matcher = sequence.matcher
        if matcher is not None and matcher.found_at is not None:
            return matcher.text[: matcher.found_at]
        stopped = sequence.finish_reason is FinishReason.STOP
        return self._decode((ids[:-1] if stopped else ids).tolist())


class _Feed:
    """The caller's requests, pulled one by one.

    An iterable with `ready()` (a background tokeniser) is not waited for while sequences run.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        self._iterator = iter(requests)
        self._ready = getattr(requests, "ready", None)
        self.exhausted = False

    def next(self, may_wait: bool) -> Request | None:
        if self.exhausted or (self._ready is not None and not may_wait and not self._ready()):
            return None
        request = next(self._iterator, None)
        self.exhausted = request is None
        return request


def kv_shape(loaded: LoadedModel) -> KVShape:
    a = loaded.architecture
    return KVShape(a.num_layers, a.num_kv_heads, a.head_dim, loaded.dtype)


def resolve_determinism(config: EngineConfig, loaded: LoadedModel) -> Determinism:
    """`auto` is bitwise on the CPU, where it costs little, and fast elsewhere."""
    if config.determinism is not Determinism.auto:
        return config.determinism
    return Determinism.bitwise if loaded.device.type == "cpu" else Determinism.fast
