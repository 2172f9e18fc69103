"""A model that the fused walk does not know, under torch.compile: one graph, whatever the sizes.

transformers' modules are traced as one graph, with attention as an operator in it. The compiled model is
called once at start, on two small steps, and held against the uncompiled one: what cannot be traced, does
not compile or computes something else is refused with the reason. The engine captures it in its CUDA
graphs as any other forward. Knows models and compilers; refuses to know buffers and graphs.

Where many processes start at once on one cache folder (TORCHINDUCTOR_CACHE_DIR), nothing more is
needed: both inductor's and Triton's entries lie under a hash of source and versions, are written
beside their place under a name of the process's own and renamed into it, and C++ is built under a lock.

Shapes: T = tokens, N = logits wanted, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.decorators import mark_dynamic

from pipeline.kernels.decode_plan import allocate_workspace
from pipeline.models.cuda_attention import CudaAttentionContext, CudaGroup, PromptKernel
from pipeline.models.layers import layers_by_window
from pipeline.models.load import LoadedModel
from pipeline.models.traced_context import of_one_kind, traced

# (input_ids [T], positions [T], context, logits_index [N]) -> logits [N, V]
Forward = Callable[[torch.Tensor, torch.Tensor, CudaAttentionContext, torch.Tensor], torch.Tensor]
Step = tuple[torch.Tensor, torch.Tensor, CudaAttentionContext, torch.Tensor]
PromptKernels = Mapping[int | None, PromptKernel]

# Share of the largest logit that compiled and uncompiled may differ by; in half types the uncompiled
# model itself is off by more than float32's.
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 5e-2
# New tokens of the rows of two steps. The first one's are traced: the compiler takes equal sizes for one and
# the same, so tokens (44) and rows (15) differ from each other and from what models and caches are like.
_STEPS = ([1] * 6 + [2] * 3 + [5] * 4 + [6] * 2, [1] * 3)


class CompileRefused(ValueError):
    """A model that torch.compile cannot run as one graph, or gets wrong. The message is the reason."""


def compile_forward(
    loaded: LoadedModel,
    block_size: int,
    eager: Forward,
    prompt_kernels: PromptKernels,
    backend: str | Callable[..., Any] = "inductor",
) -> Forward:
    """The model's step function as one compiled graph for all sizes, compiled and proved when this returns.

    block_size, prompt_kernels: what steps will come with, so that nothing is compiled again for them. eager:
    the same model's uncompiled one. CompileRefused, with the reason, if that cannot be had.
    """
    forward = _with_all_sizes(compile_step(loaded.model, backend), eager)
    try:
        difference = largest_difference(loaded, block_size, forward, eager, prompt_kernels)
    except Exception as error:  # compilers fail in any way at all: that is the answer
        raise CompileRefused(_reason(error)) from error
    tolerance = _TOLERANCE if loaded.dtype == torch.float32 else _HALF_TOLERANCE
    if not difference <= tolerance:
        raise CompileRefused(f"its compiled logits are {difference:.2%} off the uncompiled ones")
    return forward


def _reason(error: BaseException) -> str:
    """The first line of what went wrong, without the compiler's wrapping."""
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {line}"


def transformers_step(model: Any) -> Callable[..., torch.Tensor]:
    """(input_ids [T], positions [T], what the attention is handed, logits_index [N]) -> logits [N, V]."""

    def step(
        input_ids: torch.Tensor, positions: torch.Tensor, context: Any, logits_index: torch.Tensor
    ) -> torch.Tensor:
        return model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logits_index,
            tokenmill=context,
        ).logits[0]

    return step


def compile_step(model: Any, backend: str | Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """`transformers_step` as one compiled graph."""
    step = transformers_step(model)
    # The compiler counts how often a code object was compiled and gives up at a limit: one for each model.
    own = FunctionType(step.__code__.replace(), step.__globals__, closure=step.__closure__)
    # Not mode="reduce-overhead": the engine captures its graphs itself.
    return torch.compile(own, fullgraph=True, backend=backend)


def _with_all_sizes(step: Callable[..., torch.Tensor], eager: Forward) -> Forward:
    """Sizes of one are constants to the compiler, each worth a graph of its own: they are kept from it."""

    def forward(
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: CudaAttentionContext,
        logits_index: torch.Tensor,
    ) -> torch.Tensor:
        if len(input_ids) == 1:
            return eager(input_ids, positions, context, logits_index)
        wanted = logits_index.repeat(2) if len(logits_index) == 1 else logits_index
        ids, positions, wanted = (of_one_kind(tensor) for tensor in (input_ids, positions, wanted))
        for tensor in (ids, positions, wanted):
            mark_dynamic(tensor, 0)
        return step(ids, positions, traced(context), wanted)[: len(logits_index)]

    return forward


def largest_difference(
    loaded: LoadedModel,
    block_size: int,
    forward: Forward,
    eager: Forward,
    prompt_kernels: PromptKernels,
) -> float:
    """How far two small steps are from the uncompiled ones, as a share of the largest logit."""
    worst = 0.0
    for query_lens in _STEPS:
        steps = [small_step(loaded, block_size, query_lens, prompt_kernels) for _ in range(2)]
        with torch.inference_mode():
            got, expected = forward(*steps[0]).float(), eager(*steps[1]).float()
            worst = max(worst, float((got - expected).abs().max() / expected.abs().max()))
    return worst


def small_step(
    loaded: LoadedModel, block_size: int, query_lens: list[int], prompt_kernels: PromptKernels
) -> Step:
    """Rows of so many new tokens each behind an empty cache of their own, those of one token first."""
    a, device, rows = loaded.architecture, loaded.device, len(query_lens)
    lens = torch.tensor(query_lens, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in query_lens])
    row_of = torch.arange(rows).repeat_interleave(lens)
    slots = ((1 + row_of) * block_size + positions).to(device)
    tables = (1 + torch.arange(rows, dtype=torch.int32))[:, None].to(device)
    size = (rows + 1, a.num_kv_heads, block_size, a.head_dim)
    keys, values = (
        [torch.zeros(size, dtype=loaded.dtype, device=device) for _ in range(a.num_layers)] for _ in range(2)
    )
    groups = {
        window: CudaGroup(
            slots,
            tables,
            allocate_workspace(
                rows,
                a.num_heads,
                a.num_kv_heads,
                a.head_dim,
                max_context=block_size,
                page_size=block_size,
                dtype=loaded.dtype,
                device=device,
                bitwise=False,
            ),
        )
        for window in layers_by_window(loaded)
    }
    start_loc = torch.cat([torch.zeros(1, dtype=torch.int32), lens.cumsum(0, dtype=torch.int32)])
    context = CudaAttentionContext(
        keys,
        values,
        groups,
        next((i for i, n in enumerate(query_lens) if n > 1), rows),
        lens.to(device),
        start_loc.to(device),
        torch.zeros(rows, dtype=torch.int32, device=device),
        prompt_kernels,
    )
    context.plan()
    ids = torch.arange(len(positions), device=device) * 7 % loaded.vocab_size
    return ids, positions.to(device), context, (start_loc[1:].long() - 1).to(device)
