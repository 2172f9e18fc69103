"""transformers' continuous batching behind the interface of our engine: requests in, completions out.

The fallback for models that the native engine refuses, and the yardstick it is measured by. Keeps a
bounded number of rows with the manager and pulls the next as rows end. Greedy tokens are those of
transformers; draws at temperature > 0 cannot be repeated, as rows share one random stream, and the
samples of a row are separate requests. Knows requests and completions; `continuous_batching.py` knows
the manager, `transformers_limits.py` what is refused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config import ModelConfig, TransformersEngineConfig
from pipeline.engine.continuous_batching import Batching, Generated, batching, num_cache_blocks
from pipeline.engine.feed import Feed
from pipeline.engine.intake import refusal_of
from pipeline.engine.transformers_limits import SHARED, why_not
from pipeline.models.load import LoadedModel, load_tokenizer
from pipeline.models.transformers_model import load_for_transformers
from pipeline.request import Completion, FinishReason, Refusal, Request, RowError, SamplingParams

# How long to wait for a row before asking again whether to stop, or whether the next request is ready.
_TURN_S = 0.02


@dataclass(frozen=True)
class TransformersStats:
    """A snapshot. num_waiting: rows handed over that do not run yet. kv_use: share of the cache in use.
    busy_seconds: time with rows in flight. num_steps: of the manager that runs, 0 without one.
    """

    num_running: int
    num_waiting: int
    kv_use: float
    prompt_tokens: int
    completion_tokens: int
    busy_seconds: float
    num_steps: int


class TransformersEngine:
    """Generates completions for a stream of requests, through transformers' own engine.

    sampling: how all rows are sampled; a request that differs in temperature, top_k, top_p, min_p or
    logprobs ends as an error, as does one that asks for what this engine lacks.

    Raises ValueError for settings that cannot work, naming key, value and remedy.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: TransformersEngineConfig | None = None,
        *,
        sampling: SamplingParams | None = None,
    ) -> None:
        self.config = config = config or TransformersEngineConfig()
        self.loaded = loaded
        self._sampling = sampling or SamplingParams()
        reason = why_not(self._sampling)
        if reason is not None:
            raise ValueError(reason)
        self._capacity = num_cache_blocks(loaded, config)
        self._batching: Batching | None = None
        self._is_generating = False
        self._in_flight: dict[str, tuple[Request, int]] = {}
        self._num_submitted = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._busy_s = 0.0

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        engine: TransformersEngineConfig | None = None,
        *,
        sampling: SamplingParams | None = None,
        **model: Any,
    ) -> TransformersEngine:
        """Load a model folder (or hub name) with its tokenizer; `model` are fields of ModelConfig."""
        config, engine = ModelConfig(path=path, **model), engine or TransformersEngineConfig()
        return cls(load_for_transformers(config, engine, load_tokenizer(config)), engine, sampling=sampling)

    @property
    def stats(self) -> TransformersStats:
        running = self._batching.num_running if self._batching else 0
        return TransformersStats(
            num_running=running,
            num_waiting=max(0, len(self._in_flight) - running),
            kv_use=self._batching.kv_use if self._batching else 0.0,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            busy_seconds=self._busy_s,
            num_steps=self._batching.num_steps if self._batching else 0,
        )

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Keep one manager, with its cache and its graphs, for every generate within.

        Without, each generate makes its own. ValueError if its cache cannot be made.
        """
        if self._batching is not None:
            raise RuntimeError("the engine has a session already: leave that one first")
        with batching(self.loaded, self.config, self._sampling, self._capacity) as self._batching:
            try:
                yield
            finally:
                self._batching = None

    def generate(
        self,
        requests: Iterable[Request],
        should_stop: Callable[[], bool] = lambda: False,
        wanted: Callable[[Request, int], bool] = lambda request, sample: True,
    ) -> Iterator[Completion]:
        """Yield every sample of every request as it finishes.

        requests are pulled lazily, a batch ahead. When should_stop says yes, or the iterator is closed
        early, what is in flight is dropped and the engine can be used again. wanted is asked of a request
        and a sample before it is handed over; if it is not, nothing comes of it. RuntimeError when
        transformers' engine dies: rows that ended before have been yielded, the others have not.
        One generate at a time: a second raises RuntimeError.
        """
        if self._is_generating:
            raise RuntimeError("the engine is already generating: exhaust or close that iterator first")
        self._is_generating = True
        try:
            with contextlib.nullcontext() if self._batching else self.session():
                assert self._batching is not None
                try:
                    yield from self._loop(self._batching, Feed(requests), should_stop, wanted)
                finally:
                    self._batching.cancel(self._in_flight)
                    self._in_flight.clear()
        finally:
            self._is_generating = False

    def _loop(
        self,
        rows: Batching,
        feed: Feed,
        should_stop: Callable[[], bool],
        wanted: Callable[[Request, int], bool],
    ) -> Iterator[Completion]:
        while not should_stop():
            yield from self._take_in(rows, feed, wanted)
            if not self._in_flight:
                if feed.exhausted:
                    return
                continue
            began = time.perf_counter()
            generated = rows.next(_TURN_S)
            self._busy_s += time.perf_counter() - began
            # In a session, what an earlier generate dropped may still come.
            if generated is not None and generated.name in self._in_flight:
                yield self._completion(generated)

    def _take_in(
        self, rows: Batching, feed: Feed, wanted: Callable[[Request, int], bool]
    ) -> Iterator[Completion]:
        """Pull requests until as many rows wait as run; hand back those that cannot run."""
        while len(self._in_flight) < 2 * self.config.max_num_seqs:
            request = feed.next(may_wait=not self._in_flight)
            if request is None:
                return
            refusal = refusal_of(request, self.loaded) or self._refusal(request)
            if refusal is None:
                # Whatever would break the manager breaks all of its rows, so nothing such gets here.
                self._submit(rows, request, wanted)
                continue
            for sample in request.samples:
                yield Completion(request, sample, refusal.finish_reason, error=refusal.error)

    def _submit(self, rows: Batching, request: Request, wanted: Callable[[Request, int], bool]) -> None:
        prompt, stop_ids = request.prompt_ids.tolist(), self._stop_ids(request.params)
        for sample in request.samples:
            if not wanted(request, sample):
                continue
            name = str(self._num_submitted)
            self._num_submitted += 1
            self._in_flight[name] = (request, sample)
            rows.submit(name, prompt, self._longest(request) - len(prompt), stop_ids)
            self._prompt_tokens += len(prompt)

    def _refusal(self, request: Request) -> Refusal | None:
        """Why a request that the model could take cannot run here."""
        reason = why_not(request.params) or self._differs(request.params)
        if reason is not None:
            return _error("sampling_unsupported", reason)
        if self._longest(request) > self._capacity * self.config.block_size:
            return _error(
                "row_exceeds_kv_cache",
                f"{self._capacity} blocks of engine.block_size={self.config.block_size} hold no row of "
                f"{self._longest(request)} tokens: raise engine.num_blocks or the memory for it, or lower "
                "sampling.max_tokens",
            )
        return None

    def _differs(self, params: SamplingParams) -> str | None:
        for name in SHARED:
            value, ours = getattr(params, name), getattr(self._sampling, name)
            if value != ours:
                return (
                    f"sampling.{name}={value} for one row, {ours} for the others: engine=transformers "
                    "samples all rows alike; use engine=native"
                )
        return None

    def _longest(self, request: Request) -> int:
        """Tokens at which the row ends, its prompt included."""
        return min(len(request.prompt_ids) + request.params.max_tokens, self.loaded.max_model_len)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self.loaded.eos_ids)))

    def _completion(self, generated: Generated) -> Completion:
        request, sample = self._in_flight.pop(generated.name)
        if generated.error is not None:
            error = RowError("generation_failed", generated.error)
            return Completion(request, sample, FinishReason.ERROR, error=error)
        ids = np.array(generated.ids, np.int32)
        stopped = int(ids[-1]) in self._stop_ids(request.params)
        self._completion_tokens += len(ids)
        return Completion(
            request=request,
            sample=sample,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            token_ids=ids,
            text=self._text(ids[:-1] if stopped else ids),
            logprobs=np.array(generated.logprobs, np.float32) if request.params.logprobs else None,
        )

    def _text(self, ids: np.ndarray) -> str | None:
        tokenizer = self.loaded.tokenizer
        return None if tokenizer is None else tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def _error(code: str, message: str) -> Refusal:
    return Refusal(FinishReason.ERROR, RowError(code, message))
