"""Everything a GPU needs before the first step: how much KV memory there is, kernels, graphs.

KV memory is what remains of `engine.gpu_memory_utilization` after the weights and after the largest
step's activations, which are measured by running one. Knows memory and sizes; refuses to know
sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pipeline.config import EngineConfig
from pipeline.engine.cuda_runner import CudaRunner
from pipeline.engine.cuda_slots import CudaSlots
from pipeline.engine.kv_cache import KVCache, KVShape
from pipeline.engine.sampler import Sampler
from pipeline.engine.step_buffers import layout_of
from pipeline.models.forward import Forward, make_forward
from pipeline.models.load import LoadedModel

# Graphs keep their kernels' arguments and a pool of activations; libraries keep workspaces.
_GRAPH_RESERVE = 2 * 2**30
# A row of padding costs nothing in attention and little in the products: large sizes may be far apart.
_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, *range(320, 1025, 64))


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Row counts that decode graphs are captured for, up to the one that holds a full batch."""
    sizes = [size for size in _SIZES if size < max_num_seqs]
    return (*sizes, max_num_seqs)


@dataclass(frozen=True)
class Measured:
    """A model ready to run on its GPU: its step function, and GiB left for the KV cache."""

    forward: Forward
    kv_gigabytes: float


def measure(loaded: LoadedModel, config: EngineConfig) -> Measured:
    """Fuse the model's layers and run its largest steps. ValueError if they leave no KV memory."""
    device = loaded.device
    forward, _ = make_forward(loaded.model, config.fused)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated(device)
    # Graphs take their memory from a pool of their own, so both steps' activations are there at once.
    prefill = _peak_of(lambda: _run_prefill(loaded, config), device)
    decode = _peak_of(lambda: _draw_full_batch(loaded, config), device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    allowed = int(total * config.gpu_memory_utilization) - (total - free)
    left = allowed - int((prefill + decode) * 1.1) - _GRAPH_RESERVE
    if left <= 0:
        raise ValueError(
            f"engine.gpu_memory_utilization={config.gpu_memory_utilization} leaves no KV memory: weights "
            f"take {weights / 2**30:.1f} GiB and the largest steps {(prefill + decode) / 2**30:.1f} of "
            f"{total / 2**30:.1f}; raise it, or lower engine.max_num_batched_tokens or engine.max_num_seqs"
        )
    return Measured(forward, left / 2**30)


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
    shape: KVShape,
    blocks_of_layer: Mapping[int, int],
    windows: tuple[int | None, ...],
    sampler: Sampler,
) -> CudaSlots:
    """Allocate the KV cache, capture the graphs, make streams and slots."""
    blocks_per_row = -(-loaded.max_model_len // config.block_size)
    runner = CudaRunner(
        loaded=loaded,
        cache=KVCache(shape, blocks_of_layer, config.block_size, loaded.device),
        sampler=sampler,
        forward=measured.forward,
        windows=windows,
        blocks_per_row=blocks_per_row,
        num_slots=config.max_num_seqs,
        graph_sizes=graph_sizes(config.max_num_seqs) if config.cuda_graphs else (),
    )
    rows = config.max_num_seqs
    largest = layout_of(config.max_num_batched_tokens + rows, rows, rows, blocks_per_row, windows)
    return CudaSlots(runner, largest)


@torch.inference_mode()
def _run_prefill(loaded: LoadedModel, config: EngineConfig) -> None:
    ids = torch.zeros((1, config.max_num_batched_tokens), dtype=torch.int64, device=loaded.device)
    rows = torch.arange(config.max_num_seqs, device=loaded.device) % ids.shape[1]
    loaded.model(
        input_ids=ids,
        position_ids=torch.zeros_like(ids),
        use_cache=False,
        logits_to_keep=rows,
        tokenmill=_NoAttention(),
    ).logits[0].float()


@torch.inference_mode()
def _draw_full_batch(loaded: LoadedModel, config: EngineConfig) -> None:
    size = (config.max_num_seqs, loaded.architecture.vocab_size)
    logits = torch.zeros(size, dtype=loaded.dtype, device=loaded.device).float()
    (logits - logits.amax(dim=-1, keepdim=True)).exp().cumsum(dim=-1, dtype=torch.float64)


class _NoAttention:
    """Attention that costs its output and nothing else: the kernels work in memory of their own."""

    def attend(self, layer: int, query: torch.Tensor, *_: torch.Tensor, **__: object) -> torch.Tensor:
        return torch.zeros_like(query)
