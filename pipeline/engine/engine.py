"""The engine: requests in, completions out, batch N+1 prepared while batch N computes.

Each turn of the loop plans a step, launches it, and only then takes in the result of the step
before. Tokens sampled by that step are not known while the next is planned; they are carried over
on the device. Knows the loop; each of its parts knows the rest.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.config import Determinism, EngineConfig, EngineMode, ModelConfig
from pipeline.engine.allocator import keep_freed_memory
from pipeline.engine.batch import build_inputs
from pipeline.engine.feed import Feed
from pipeline.engine.intake import refusal_of
from pipeline.engine.kv_cache import KVCache
from pipeline.engine.kv_sizes import block_tables_of, kv_shape, num_blocks_of
from pipeline.engine.model_runner import ModelRunner
from pipeline.engine.sampler import Sampler
from pipeline.engine.scheduler import Schedule, Scheduler, SchedulerCounters
from pipeline.engine.sequence import Sequence, SequenceTable, TokenLogprobs, make_sequence
from pipeline.engine.slots import BatchSlots, InFlight, Slots
from pipeline.engine.step_clock import StepClock, WindowRecorder
from pipeline.engine.stop_strings import StopStringMatcher
from pipeline.models.layers import layers_by_window
from pipeline.models.load import LoadedModel, load_model, load_tokenizer
from pipeline.models.weight_state import weight_state
from pipeline.request import Completion, FinishReason, Refusal, Request, RowError, SamplingParams
from pipeline.timeline import Timeline

if TYPE_CHECKING:
    from pipeline.engine.cuda_slots import CudaSlots


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. kv_use: share of the KV blocks owned. busy_seconds: time spent in steps, on the device.

    phase_seconds: the host's time while generating, by `step_clock.Phase`; all phases are there.
    """

    num_running: int
    num_waiting: int
    kv_use: float
    prompt_tokens: int
    completion_tokens: int
    busy_seconds: float
    phase_seconds: Mapping[str, float]
    counters: SchedulerCounters

    @property
    def generating_seconds(self) -> float:
        """Time from a generate's begin to its end, the consumer's share included."""
        return sum(self.phase_seconds.values())


@dataclass(frozen=True)
class _Launched:
    """A step in the air. number: how many were launched before it since generating began."""

    number: int
    schedule: Schedule
    slot: InFlight


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
        bitwise = resolve_determinism(config, loaded) is Determinism.bitwise
        layers = layers_by_window(loaded)
        on_gpu = loaded.device.type == "cuda"
        if on_gpu:
            # Imports triton, which a machine without a GPU need not have.
            from pipeline.engine.cuda_sampler import CudaSampler
            from pipeline.engine.cuda_setup import measure, set_up

            cuda_sampler = CudaSampler(loaded.vocab_size, logprobs=logprobs, num_topk=num_topk)
            measured = measure(loaded, config, kv_shape(loaded), layers, cuda_sampler, bitwise)
        else:
            keep_freed_memory()
        gigabytes = measured.kv_gigabytes if on_gpu else config.kv_cache_gb
        num_blocks = num_blocks_of(loaded, config, layers, gigabytes)
        self._blocks = block_tables_of(loaded, config, num_blocks)
        self._table = SequenceTable(config.max_num_seqs, num_topk)
        self._scheduler = Scheduler(
            self._table,
            self._blocks,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefix_sharing=config.prefix_sharing,
            reserve=config.reserve,
            longest_first=on_gpu if config.longest_first is None else config.longest_first,
            admission_batch=config.admission_batch or (max(1, config.max_num_seqs // 16) if on_gpu else 1),
        )
        self._overlaps = on_gpu if config.mode is None else config.mode is EngineMode.async_
        self._lookahead = config.lookahead or config.max_num_seqs * (4 if on_gpu else 1)
        self._records_logprobs = logprobs or num_topk > 0
        blocks_of_layer = {layer: num_blocks[window] for window in layers for layer in layers[window]}
        cache = KVCache(kv_shape(loaded), blocks_of_layer, config.block_size, loaded.device)
        # What the engine chose for itself at start, in words.
        self.about = measured.about if on_gpu else "layers transformers' modules"
        self._runner: ModelRunner | None = None
        self._cuda: CudaSlots | None = None
        if on_gpu:
            self._cuda = set_up(loaded, config, measured, cache, layers, cuda_sampler, bitwise)
        else:
            self._runner = ModelRunner(
                loaded,
                cache,
                Sampler(loaded.vocab_size, logprobs=logprobs, num_topk=num_topk),
                num_slots=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                bitwise=bitwise,
            )
        self._weights = weight_state(loaded.model)
        self._slots: Slots | None = None
        self._clock = StepClock()
        self._recorder: WindowRecorder | None = None
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
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            kv_use=self._blocks.use,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            busy_seconds=self._busy_before + (self._slots.busy_seconds if self._slots else 0.0),
            phase_seconds=self._clock.phase_seconds,
            counters=replace(self._scheduler.counters),
        )

    @property
    def timeline(self) -> Timeline | None:
        """The window of the latest generate that engine.timeline asked for, once it is over."""
        return self._recorder.timeline if self._recorder else None

    def generate(
        self,
        requests: Iterable[Request],
        should_stop: Callable[[], bool] = lambda: False,
        wanted: Callable[[Request, int], bool] = lambda request, sample: True,
    ) -> Iterator[Completion]:
        """Yield every sample of every request as it finishes.

        requests are pulled lazily, a batch ahead. should_stop is asked once a step; when it says yes,
        or the iterator is closed early, what is in flight is dropped and the engine can be used again.
        wanted is asked of a request and a sample when it is let in; if it is not, nothing comes of it.
        One generate at a time: a second raises RuntimeError.
        """
        if self._slots is not None:
            raise RuntimeError("the engine is already generating: exhaust or close that iterator first")
        self._see_weights()
        self._slots = self._open_slots()
        self._recorder = self._make_recorder(self._slots)
        try:
            with self._slots, self._clock:
                for completion in self._loop(Feed(requests), should_stop, wanted):
                    # Whatever goes on after the yield enters its own phase.
                    self._clock.enter("consumer")
                    yield completion
                self._recorder.close()
        except Exception:
            # Blocks are named before the step that fills them; of one that failed nobody may share.
            self._blocks.forget_prefixes()
            raise
        finally:
            self._busy_before += self._slots.busy_seconds
            self._slots = None
            self._scheduler.drop_all()

    def _see_weights(self) -> None:
        """Nothing that was made with other weights may be used: neither K/V nor graphs."""
        state = weight_state(self.loaded.model)
        if state == self._weights:
            return
        self._blocks.forget_prefixes()
        if self._cuda is not None:
            from pipeline.engine.cuda_setup import renew

            renew(self._cuda, self.loaded, self.config)
            state = weight_state(self.loaded.model)
        self._weights = state

    def _open_slots(self) -> Slots:
        if self._cuda is not None:
            return self._cuda
        assert self._runner is not None
        return BatchSlots(self._runner.run, overlap=self._overlaps)

    def _make_recorder(self, slots: Slots) -> WindowRecorder:
        first, steps = self.config.timeline_after, self.config.timeline_steps
        window = range(first, first + steps) if self.config.timeline else range(0)
        mode = EngineMode.async_ if self._overlaps else EngineMode.sync
        return WindowRecorder(self._clock, slots, mode.value, self._cuda is not None, window)

    def _loop(
        self, feed: Feed, should_stop: Callable[[], bool], wanted: Callable[[Request, int], bool]
    ) -> Iterator[Completion]:
        assert self._slots is not None and self._recorder is not None
        clock = self._clock
        in_flight: _Launched | None = None
        num_launched = 0
        while not should_stop():
            self._recorder.turn(num_launched, num_launched - (in_flight is not None))
            yield from self._take_in(feed)
            clock.enter("schedule")
            schedule = self._scheduler.schedule(lambda sequence: wanted(sequence.request, sequence.sample))
            launched = None
            try:
                if schedule is not None:
                    launched = self._launch(num_launched, schedule)
                    num_launched += 1
                if not self._overlaps:
                    in_flight, launched = launched, None
                if in_flight is not None:
                    result, in_flight = in_flight, None
                    yield from self._take_result(result)
                in_flight = launched
            except torch.OutOfMemoryError as error:
                yield from self._retreat(error, in_flight, launched)
                in_flight = None
            clock.enter("consumer", num_launched)
            if in_flight is None and not self._scheduler.has_work and feed.exhausted:
                return

    def _launch(self, number: int, schedule: Schedule) -> _Launched:
        assert self._slots is not None
        self._clock.enter("prepare")
        inputs = build_inputs(schedule, self._table, self._blocks)
        # Without a thread and without a device of its own, launching is computing.
        self._clock.enter("launch" if self._overlaps or self._cuda else "wait")
        return _Launched(number, schedule, self._slots.launch(inputs))

    def _retreat(
        self, error: torch.OutOfMemoryError, before: _Launched | None, after: _Launched | None
    ) -> Iterator[Completion]:
        """A step found no memory: all its rows wait again, and steps are half as large from now on.

        before: the step in the air when the failed one was launched, whose result is good. after: one that
        was launched behind the failed one, and computed nonsense.
        """
        if before is not None:
            yield from self._take_result(before)
        if after is not None:
            with contextlib.suppress(torch.OutOfMemoryError):
                after.slot.result()
        if not self._scheduler.retreat():
            raise error
        if self._cuda is not None:
            torch.cuda.empty_cache()
        warnings.warn(
            "a step ran out of memory and its rows start again; from now on steps are limited to "
            f"{self._scheduler.max_num_batched_tokens} tokens of {self._scheduler.most_running} rows. "
            "Lower engine.max_num_seqs, engine.max_num_batched_tokens or engine.gpu_memory_utilization",
            stacklevel=2,
        )

    def _take_in(self, feed: Feed) -> Iterator[Completion]:
        """Pull requests until a batch of sequences waits; hand back those that cannot run."""
        # A long stretch of refused rows must not keep the loop from its other work, stopping included.
        for _ in range(self._lookahead):
            self._clock.enter("intake")
            if self._scheduler.num_waiting >= self._lookahead:
                return
            request = feed.next(may_wait=not self._scheduler.has_work)
            if request is None:
                return
            refusal = refusal_of(request, self.loaded) or self._enqueue(request)
            if refusal is not None:
                for sample in request.samples:
                    yield Completion(request, sample, refusal.finish_reason, error=refusal.error)

    def _enqueue(self, request: Request) -> Refusal | None:
        """Queue each sample of a request, or say why not. ValueError for what no row could have."""
        self._require(request.params)
        hashes: list[bytes] = []
        sequences = [self._sequence(request, sample, hashes) for sample in request.samples]
        try:
            for sequence in sequences:
                self._scheduler.add(sequence)
        except ValueError as error:
            return Refusal(FinishReason.ERROR, RowError("row_exceeds_kv_cache", str(error)))
        self._prompt_tokens += len(request.prompt_ids) * len(request.samples)
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

    def _require(self, params: SamplingParams) -> None:
        """What the engine was made without it cannot give to a row."""
        if params.stop and self.loaded.tokenizer is None:
            raise ValueError("sampling.stop needs a tokenizer to find strings: load the model with one")
        if params.top_logprobs > self._table.num_topk or (params.logprobs and not self._records_logprobs):
            raise ValueError(
                f"a request asks for logprobs={params.logprobs}, top_logprobs={params.top_logprobs}, which "
                "the engine does not record: make it with Engine(..., logprobs=True, num_topk=K)"
            )

    def _matcher(self, stop: tuple[str, ...]) -> StopStringMatcher | None:
        return StopStringMatcher(stop, self._decode) if stop else None

    def _decode(self, ids: list[int]) -> str:
        return self.loaded.tokenizer.decode(ids, skip_special_tokens=True)

    def _take_result(self, step: _Launched) -> Iterator[Completion]:
        self._clock.enter("wait", step.number)
        output = step.slot.result()
        self._clock.enter("update")
        logprobs = None
        if self._records_logprobs and output.logprobs is not None:
            none = np.empty((len(output.ids), 0))
            logprobs = TokenLogprobs(
                output.logprobs,
                none if output.topk_ids is None else output.topk_ids,
                none if output.topk_logprobs is None else output.topk_logprobs,
            )
        for sequence in self._scheduler.update(step.schedule, output.ids, logprobs):
            self._clock.enter("complete")
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


def resolve_determinism(config: EngineConfig, loaded: LoadedModel) -> Determinism:
    """`auto` is bitwise on the CPU, where it costs little, and fast elsewhere."""
    if config.determinism is not Determinism.auto:
        return config.determinism
    return Determinism.bitwise if loaded.device.type == "cpu" else Determinism.fast
