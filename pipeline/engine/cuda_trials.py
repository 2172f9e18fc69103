"""Steps that nobody asked for: run at start to see what a step takes, and whether rows are kept apart.

Knows the runner's inputs; refuses to know what is concluded (`cuda_setup.py`).

Shapes: N = sampled rows, V = vocabulary.
"""

from __future__ import annotations

import torch

from pipeline.engine.cuda_runner import CudaRunner, Views
from pipeline.engine.cuda_sampler import RowParameters
from pipeline.engine.step_buffers import layout_of


@torch.inference_mode()
def run_prompts(runner: CudaRunner, num_tokens: int, num_sampled: int) -> None:
    """A step of long prompts whose keys and values go nowhere, with so many rows sampled."""
    longest = runner.blocks_per_row * runner.cache.block_size
    num_rows = -(-num_tokens // longest)
    views = _zero_views(runner, num_tokens, num_rows, num_sampled)
    for i in range(len(runner.windows)):
        views[f"slot_mapping{i}"].fill_(-1)
    ends = [min(row * longest, num_tokens) for row in range(num_rows + 1)]
    views["query_start_loc"].copy_(torch.tensor(ends))
    runner.sampler(_logits(runner, views), RowParameters(*(views[name] for name in RowParameters._fields)))


@torch.inference_mode()
def logits_of_equal_rows(runner: CudaRunner, num_rows: int, most_sampled: int) -> torch.Tensor:
    """A step of so many equal rows of one token each, all through the prompts' attention kernel.

    Logits [N, V] of the first rows, N at most most_sampled. Overwrites the first block.
    """
    views = _zero_views(runner, num_rows, num_rows, min(num_rows, most_sampled))
    device = views["input_ids"].device
    for i in range(len(runner.windows)):
        views[f"slot_mapping{i}"].fill_(runner.cache.block_size)
        views[f"block_tables{i}"].fill_(1)
    views["context_lens"].fill_(1)
    views["query_start_loc"].copy_(torch.arange(num_rows + 1, device=device))
    views["logits_index"].copy_(torch.arange(len(views["logits_index"]), device=device))
    return _logits(runner, views)


def _logits(runner: CudaRunner, views: Views) -> torch.Tensor:
    return runner.logits(
        views["input_ids"], views["positions"], runner.context(views, 0), views["logits_index"]
    )


def _zero_views(runner: CudaRunner, num_tokens: int, num_rows: int, num_sampled: int) -> Views:
    layout = layout_of(num_tokens, num_rows, num_sampled, runner.blocks_per_row, runner.windows)
    return layout.tensors(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=runner.loaded.device))
