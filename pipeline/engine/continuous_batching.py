"""The life of one of transformers' continuous batching managers: start, rows in, rows out, end.

The manager computes in a thread of its own. When that thread dies it fails all rows it has and takes
no more, silently; here that becomes an exception. Differences between transformers' versions end in this
file. Knows the manager; refuses to know rows and completions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type

from pipeline.config import Attention, EngineMode, TransformersEngineConfig
from pipeline.models.load import LoadedModel
from pipeline.models.transformers_model import PAGES_BY_CALL
from pipeline.request import SamplingParams

_LOGGER = "ContinuousBatchingLogger"
_DEATH_S = 30.0
_GPU_KV_SHARE = 0.8


@dataclass(frozen=True)
class Generated:
    """What became of a row. ids: the stop token included. error: why there is nothing more, if so."""

    name: str
    ids: list[int]
    logprobs: list[float]
    error: str | None


class Batching:
    """A running manager. Made by `batching`, which also ends it."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def submit(self, name: str, prompt_ids: list[int], max_tokens: int, stop_ids: Iterable[int]) -> None:
        """Queue a row under a name of its own. RuntimeError if the manager has died."""
        taken = self._manager.add_request(
            prompt_ids, request_id=name, max_new_tokens=max_tokens, eos_token_id=list(stop_ids)
        )
        if taken is None:
            self._raise_death()

    def next(self, timeout: float) -> Generated | None:
        """A finished row, or None if none finished in time. RuntimeError if the manager has died."""
        output = self._manager.get_result(timeout=timeout)
        if output is None:
            # A row may have finished between the look into the queue and this one.
            if self._is_alive() or not self._manager.output_router.output_queue.empty():
                return None
            self._raise_death()
        if output.error is not None and not self._is_alive():
            self._raise_death()
        return Generated(output.request_id, output.generated_tokens, output.logprobs, output.error)

    def cancel(self, names: Iterable[str]) -> None:
        """Drop rows that nobody waits for any more."""
        for name in names:
            self._manager.cancel_request(name)

    @property
    def num_steps(self) -> int:
        # Its thread sets the count when it begins.
        return getattr(self._manager, "current_batch", 0)

    @property
    def num_running(self) -> int:
        processor = self._manager.batch_processor
        return 0 if processor is None else len(processor.scheduler.active_requests)

    @property
    def kv_use(self) -> float:
        """Share of the cache that is not free."""
        processor = self._manager.batch_processor
        if processor is None:
            return 0.0
        cache = processor.cache
        if hasattr(cache, "compute_free_capacity"):
            return 1 - cache.compute_free_capacity()
        return 1 - cache.get_num_free_blocks() / cache.num_blocks

    def _is_alive(self) -> bool:
        status = self._manager.background_thread_status
        return self._manager.is_running() and status.can_accept_new_requests() is None

    def _raise_death(self) -> NoReturn:
        # It fails its rows before it notes why; wait until it has.
        thread = self._manager._generation_thread
        if thread is not None:
            thread.join(_DEATH_S)
        cause = self._manager.background_thread_status.fatal_error
        raise RuntimeError(
            f"transformers' continuous batching died ({type(cause).__name__}: {cause}); the rows it had are "
            "still to do"
        ) from cause


@contextmanager
def batching(
    loaded: LoadedModel, config: TransformersEngineConfig, params: SamplingParams, num_blocks: int
) -> Iterator[Batching]:
    """Start a manager; stop it, drop what it has in flight and free its cache at the end.

    num_blocks: of its cache, as `num_cache_blocks` has them.

    ValueError if its cache cannot be made.
    """
    with _quiet():
        manager = _make_manager(loaded, config, params, num_blocks)
        manager.start()
        try:
            yield Batching(manager)
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()


def num_cache_blocks(loaded: LoadedModel, config: TransformersEngineConfig) -> int:
    """Blocks for the whole model (all layers) that the cache holds. ValueError if that is none."""
    if config.num_blocks is not None:
        return config.num_blocks
    a = loaded.architecture
    token_bytes = 2 * a.num_layers * a.num_kv_heads * a.head_dim * loaded.dtype.itemsize
    num_blocks = int(_kv_gigabytes(loaded, config) * 2**30) // (token_bytes * config.block_size)
    if num_blocks < 1:
        raise ValueError(
            f"{_memory_key(loaded, config)} holds no block of {config.block_size} tokens "
            f"({token_bytes * config.block_size:,} bytes): raise it, or lower engine.block_size"
        )
    # More than every row at full length is memory for nothing.
    longest = -(-loaded.max_model_len // config.block_size)
    return min(num_blocks, 2 + 2 * config.max_num_seqs * longest)


def _kv_gigabytes(loaded: LoadedModel, config: TransformersEngineConfig) -> float:
    """On a GPU a share of what gpu_memory_utilization leaves: steps and graphs take theirs, unmeasured."""
    if loaded.device.type != "cuda":
        return config.kv_cache_gb
    free, total = torch.cuda.mem_get_info(loaded.device)
    left = total * config.gpu_memory_utilization - (total - free)
    return max(0.0, left) * _GPU_KV_SHARE / 2**30


def _memory_key(loaded: LoadedModel, config: TransformersEngineConfig) -> str:
    if loaded.device.type == "cuda":
        return f"engine.gpu_memory_utilization={config.gpu_memory_utilization}"
    return f"engine.kv_cache_gb={config.kv_cache_gb}"


def runs_async(mode: EngineMode | None, device: torch.device) -> bool:
    """Whether batches overlap: transformers does that on a GPU only."""
    return mode is not EngineMode.sync and device.type == "cuda"


def _make_manager(
    loaded: LoadedModel, config: TransformersEngineConfig, params: SamplingParams, num_blocks: int
) -> Any:
    try:
        manager = loaded.model.init_continuous_batching(
            generation_config=_generation_config(loaded, params),
            continuous_batching_config=_batching_config(loaded, config, params, num_blocks),
        )
        # Makes the cache here, where an error can still be raised, and captures graphs on a GPU.
        manager.warmup()
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ValueError(
            f"{_memory_key(loaded, config)} with engine.max_num_batched_tokens="
            f"{config.max_num_batched_tokens} does not fit into memory: lower one of them ({error})"
        ) from error
    return manager


def _batching_config(
    loaded: LoadedModel, config: TransformersEngineConfig, params: SamplingParams, num_blocks: int
) -> ContinuousBatchingConfig:
    if PAGES_BY_CALL:
        own: dict[str, Any] = {
            "page_size": config.block_size,
            # Looking for flash attention may mean the network; a CPU has no use for it.
            "auto_switch_to_flash": config.attention is Attention.auto and loaded.device.type != "cpu",
        }
    else:
        own = {"block_size": config.block_size}
        # There a block holds one group of layers, not all of them.
        groups: Any = group_layers_by_attn_type(loaded.model.config.get_text_config())
        num_blocks *= len(groups[0])
    if loaded.device.type == "cuda":
        own |= _gpu_settings(loaded, config)
    return ContinuousBatchingConfig(
        num_blocks=num_blocks,
        max_batch_tokens=config.max_num_batched_tokens,
        max_requests_per_batch=config.max_num_seqs,
        allow_block_sharing=config.prefix_sharing,
        use_async_batching=runs_async(config.mode, loaded.device),
        return_logprobs=params.logprobs,
        # No seed: it would not repeat a row's draws, but a resumed job's rows would draw alike again.
        **own,
    )


def _gpu_settings(loaded: LoadedModel, config: TransformersEngineConfig) -> dict[str, Any]:
    """What it would otherwise guess: graphs, and blocks of the longest row, without which no row of more
    than 32 takes the path for steps that only decode."""
    # Without flash attention every graph pads a mask over all contexts: there it decides better itself.
    flash = "flash" in loaded.model.config._attn_implementation
    blocks = -(-loaded.max_model_len // config.block_size) + 1
    return {
        "use_cuda_graph": (True if flash else None) if config.cuda_graphs else False,
        "max_blocks_per_request": blocks + blocks % 2,
    }


def _generation_config(loaded: LoadedModel, params: SamplingParams) -> GenerationConfig:
    """The sampling that all rows share; the rest comes with each row."""
    sampled = params.temperature > 0
    values: dict[str, Any] = {"do_sample": sampled, "eos_token_id": -1, "pad_token_id": 0}
    if sampled:
        values |= {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k or 0}
        values |= {"min_p": params.min_p} if params.min_p else {}
    # Ids that no token has: the embedding is padded beyond the tokenizer.
    padding = range(loaded.vocab_size, loaded.architecture.vocab_size)
    return GenerationConfig(**values, suppress_tokens=list(padding) or None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the manager's logger: what it has to say reaches the caller as an exception or a row."""
    logger = logging.getLogger(_LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
