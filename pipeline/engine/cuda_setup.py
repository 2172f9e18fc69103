"""Everything a GPU needs before the first step: how much KV memory there is, kernels, graphs.

KV memory is what remains of `engine.gpu_memory_utilization` after the weights, after the largest step's
activations and after the largest graph, all measured by running one. Knows memory and sizes; refuses to
know sequences.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from pipeline.config import EngineConfig
from pipeline.engine.cuda_graphs import GraphKey, StepEnd
from pipeline.engine.cuda_runner import CudaRunner
from pipeline.engine.cuda_sampler import CudaSampler
from pipeline.engine.cuda_slots import CudaSlots
from pipeline.engine.cuda_trials import logits_of_equal_rows, run_prompts
from pipeline.engine.invariant_sizes import CANDIDATE_SIZES, find_invariant_sizes
from pipeline.engine.kv_cache import KVCache, KVShape
from pipeline.engine.step_buffers import layout_of
from pipeline.models.attention_kernel import choose_prompt_kernels
from pipeline.models.cuda_attention import PromptKernel
from pipeline.models.forward import Forward, make_forward
from pipeline.models.load import LoadedModel

# What libraries and the driver come to take later: workspaces, kernels that were not loaded yet.
_RESERVE = 2**30
# A row of padding costs nothing in attention and little in the products: large sizes may be far apart.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, *range(320, 1025, 64))


# Tokens of captured steps with prompts: at most a third of one is padding.
_PROMPT_SIZES = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Of a step's time on the device, what its enqueueing may take before graphs are worth their padding.
_HOST_SHARE = 0.4


def prompt_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Token counts that steps with prompts are captured for, up to the one that holds a full step."""
    sizes = [size for size in _PROMPT_SIZES if size < max_num_batched_tokens]
    return (*sizes, max_num_batched_tokens)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Row counts that decode graphs are captured for, up to the one that holds a full batch."""
    sizes = [size for size in _SIZES if size < max_num_seqs]
    return (*sizes, max_num_seqs)


@dataclass(frozen=True)
class Measured:
    """A model ready to run on its GPU.

    forward: its step function. prompt_kernels: what computes prompt chunks, by sliding window. about: both,
    in words. kv_gigabytes: what is left for the KV cache.
    """

    forward: Forward
    prompt_kernels: Mapping[int | None, PromptKernel]
    about: str
    kv_gigabytes: float


def measure(
    loaded: LoadedModel,
    config: EngineConfig,
    shape: KVShape,
    windows: Mapping[int | None, tuple[int, ...]],
    sampler: CudaSampler,
    bitwise: bool,
) -> Measured:
    """Fuse or compile the model's layers and run its largest steps. ValueError if they leave no KV memory."""
    device = loaded.device
    choice = choose_prompt_kernels(loaded, config.attention_kernel, config.block_size, bitwise)
    compiled = False if bitwise else config.compile
    forward, layers = make_forward(loaded, config.fused, compiled, config.block_size, choice.kernels)
    about = f"layers {layers}; prompts' attention {choice.words}"
    logging.getLogger(__name__).info(about)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    cache = _two_blocks(shape, windows, config, device)
    runner = _runner(loaded, config, forward, cache, windows, sampler, choice.kernels)
    steps = _largest_steps(runner, config)
    del cache, runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * config.gpu_memory_utilization) - (total - free)
    left = allowed - int(steps * 1.1) - _RESERVE
    if left <= 0:
        raise ValueError(
            f"engine.gpu_memory_utilization={config.gpu_memory_utilization} leaves no KV memory: weights "
            f"take {weights / 2**30:.1f} GiB and the largest steps {steps / 2**30:.1f} of "
            f"{total / 2**30:.1f}; raise it, or lower engine.max_num_batched_tokens or engine.max_num_seqs"
        )
    return Measured(forward, choice.kernels, about, left / 2**30)


def _two_blocks(
    shape: KVShape,
    windows: Mapping[int | None, tuple[int, ...]],
    config: EngineConfig,
    device: torch.device,
) -> KVCache:
    """A cache that holds nothing, for steps that are only measured."""
    layers = [layer for group in windows.values() for layer in group]
    return KVCache(shape, dict.fromkeys(layers, 2), config.block_size, device)


def _largest_steps(runner: CudaRunner, config: EngineConfig) -> int:
    """Bytes that the largest step with prompts and the largest decode step take.

    Together: graphs take their memory from a pool of their own.
    """
    tokens, rows = config.max_num_batched_tokens, config.max_num_seqs
    device = runner.loaded.device
    prompts = _peak_of(lambda: run_prompts(runner, tokens, min(tokens, rows)), device)
    return prompts + _peak_of(lambda: _capture_largest(runner, config), device)


def _peak_of(step: Callable[[], None], device: torch.device) -> int:
    """Bytes that a step takes at its worst moment, beyond what is there already."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def set_up(
    loaded: LoadedModel,
    config: EngineConfig,
    measured: Measured,
    cache: KVCache,
    windows: Mapping[int | None, tuple[int, ...]],
    sampler: CudaSampler,
    bitwise: bool,
) -> CudaSlots:
    """Capture the graphs, make streams and slots. ValueError if bitwise determinism cannot be had."""
    runner = _runner(loaded, config, measured.forward, cache, windows, sampler, measured.prompt_kernels)
    tokens, rows = max(config.max_num_batched_tokens, config.max_num_seqs), config.max_num_seqs
    if bitwise:
        sizes = _invariant_sizes(runner, tokens)
        graphs = [size for size in sizes if size < rows] + [next(size for size in sizes if size >= rows)]
        runner = replace(
            runner, invariant_sizes=sizes, graph_sizes=tuple(graphs) if config.cuda_graphs else ()
        )
        tokens, rows = sizes[-1], graphs[-1]
    if config.cuda_graphs and _bound_by_host(runner, config.max_num_batched_tokens):
        runner.sent_sizes = runner.invariant_sizes or prompt_sizes(config.max_num_batched_tokens)
    largest = layout_of(tokens, config.max_num_seqs, rows, runner.blocks_per_row, runner.windows)
    return CudaSlots(runner, largest)


def _bound_by_host(runner: CudaRunner, num_tokens: int) -> bool:
    """Whether enqueueing the largest step with prompts takes the host about as long as the GPU computes it.

    Then smaller steps leave the GPU waiting, and are captured too, at the price of padding.
    """
    host, device = [], []
    for _ in range(3):
        began, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(runner.loaded.device)
        began.record()
        started = time.perf_counter()
        run_prompts(runner, num_tokens, min(num_tokens, runner.num_slots))
        host.append(time.perf_counter() - started)
        done.record()
        done.synchronize()
        device.append(began.elapsed_time(done) / 1e3)
    return min(host) > _HOST_SHARE * min(device)


def renew(slots: CudaSlots, loaded: LoadedModel, config: EngineConfig) -> None:
    """The model's weights are others by now: everything that holds their addresses is made anew."""

    def forward() -> Forward:
        compiled = False if slots.runner.invariant_sizes is not None else config.compile
        kernels = slots.runner.prompt_kernels
        return make_forward(loaded, config.fused, compiled, config.block_size, kernels)[0]

    slots.renew(forward)


def _invariant_sizes(runner: CudaRunner, most: int) -> tuple[int, ...]:
    """Step sizes, ascending, at which rows get the bits that they get in steps of `most` tokens."""
    candidates = [most, *(size for size in reversed(CANDIDATE_SIZES) if size < most)]
    sampled = min(size for size in candidates if size >= runner.num_slots)
    sizes = find_invariant_sizes(candidates, lambda size: logits_of_equal_rows(runner, size, sampled))
    if not sizes or sizes[0] < most:
        raise ValueError(
            "engine.determinism=bitwise: on this GPU equal rows of one step get different bits; use "
            "engine.determinism=fast"
        )
    return tuple(reversed(sizes))


def _runner(
    loaded: LoadedModel,
    config: EngineConfig,
    forward: Forward,
    cache: KVCache,
    windows: Mapping[int | None, tuple[int, ...]],
    sampler: CudaSampler,
    prompt_kernels: Mapping[int | None, PromptKernel],
) -> CudaRunner:
    return CudaRunner(
        loaded=loaded,
        cache=cache,
        sampler=sampler,
        forward=forward,
        windows=tuple(windows),
        blocks_per_row=-(-loaded.max_model_len // config.block_size),
        num_slots=config.max_num_seqs,
        graph_sizes=graph_sizes(config.max_num_seqs) if config.cuda_graphs else (),
        prompt_kernels=prompt_kernels,
    )


def _capture_largest(runner: CudaRunner, config: EngineConfig) -> None:
    """What the largest decode step holds on to, and what the host's edits of its logits take besides."""
    if config.cuda_graphs:
        stream = torch.cuda.Stream(runner.loaded.device)
        runner.capture_one(GraphKey(True, max(runner.graph_sizes), StepEnd.LOGITS), stream)
    size = (config.max_num_seqs, runner.loaded.architecture.vocab_size)
    logits = torch.zeros(size, dtype=torch.float32, device=runner.loaded.device)
    # Bias, penalties and bad words each make a copy, and two are there at a time.
    torch.stack([logits, logits])
