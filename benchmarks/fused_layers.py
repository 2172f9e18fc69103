"""Times a decoder layer of Llama-3.1-8B on a GPU, fused and eager: `python benchmarks/fused_layers.py`.

bfloat16, random weights, attention left out: in its place keys and values are written and the query is
returned, for both. First the fused model is held against eager in float32: it may be no further from it than
eager in bfloat16 is. Then whole models run in CUDA graphs; a layer's time is the difference between graphs of
many and of few layers, so that embedding and final norm drop out. A layer's 436 MB of weights pass through L2
between two uses of any of them. Matrix products are timed in the same order without the rest, and one by one;
the small kernels one by one, their inputs in L2 as the product before leaves them, over several launches.
Figures are medians. Results go to $OUT/fused_layers.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
import triton
from torch.nn.functional import linear, silu
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.kernels.kv_write import write_kv  # noqa: E402
from pipeline.kernels.rms_norm import add_rms_norm  # noqa: E402
from pipeline.kernels.rope_kv import rope_kv, rotary_tables  # noqa: E402
from pipeline.kernels.silu_mul import silu_mul  # noqa: E402
from pipeline.models.fused import FusedContext, FusedModel, fuse  # noqa: E402

HIDDEN, INTERMEDIATE, QUERY_HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 14336, 32, 8, 128, 1024
MANY_LAYERS, FEW_LAYERS, CHECKED_LAYERS = 12, 4, 4
TOKENS = (1, 32, 64, 128, 256, 512)
PAGE_SIZE = 64
DTYPE = torch.bfloat16
DEVICE = "cuda"
LAUNCHES_PER_GRAPH = 20
ATTENTION_NAME = "write_only"

Result = dict[str, Any]


@dataclass(frozen=True)
class Models:
    """The same weights twice: transformers' modules and the fused walk. keys, values: per layer, for both."""

    eager: Any
    fused: FusedModel
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


@dataclass(frozen=True)
class Step:
    """input_ids, positions, slots [T]: every token a row of its own."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


def make_step(num_tokens: int) -> Step:
    generator = torch.Generator().manual_seed(num_tokens)
    return Step(
        torch.randint(VOCABULARY, (num_tokens,), generator=generator).to(DEVICE),
        torch.randint(8192, (num_tokens,), generator=generator).to(DEVICE),
        torch.randperm(max(TOKENS), generator=generator)[:num_tokens].to(DEVICE),
    )


def make_models() -> Models:
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_hidden_layers=MANY_LAYERS,
        vocab_size=VOCABULARY,
        max_position_embeddings=131_072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    AttentionInterface.register(ATTENTION_NAME, attend_eager)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=DTYPE)
    shape = (-(-max(TOKENS) // PAGE_SIZE), KV_HEADS, PAGE_SIZE, HEAD_DIM)
    keys, values = (
        [torch.zeros(shape, dtype=DTYPE, device=DEVICE) for _ in range(MANY_LAYERS)] for _ in range(2)
    )
    return Models(model.eval(), fuse(model), keys, values)


def attend_eager(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **arguments: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: writes with our own kernel, and returns the query."""
    pages: Models | None = arguments["pages"]
    if pages is not None:
        layer = module.layer_idx
        new_keys, new_values = (t[0].transpose(0, 1) for t in (key, value))
        write_kv(new_keys, new_values, pages.keys[layer], pages.values[layer], arguments["slots"])
    return query.transpose(1, 2), None


@contextmanager
def num_layers(models: Models, count: int) -> Iterator[FusedModel]:
    """The eager model runs so many layers for a while; the fused one that does."""
    models.eager.config.num_hidden_layers = count
    yield replace(models.fused, layers=models.fused.layers[:count])
    models.eager.config.num_hidden_layers = MANY_LAYERS


def run_eager(models: Models, step: Step) -> torch.Tensor:
    return models.eager.model(
        input_ids=step.input_ids[None],
        position_ids=step.positions[None],
        use_cache=False,
        pages=models,
        slots=step.slots,
    ).last_hidden_state[0]


def run_fused(models: Models, fused: FusedModel, step: Step) -> torch.Tensor:
    context = FusedContext(models.keys, models.values, {None: step.slots}, lambda layer, query, window: query)
    return fused.forward(step.input_ids, step.positions, context)


# ------------------------------------------------------------------------- correctness


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def check_model(models: Models) -> list[Result]:
    """Fused and eager in bfloat16 against eager in float32."""
    print(f"distance from float32 after {CHECKED_LAYERS} layers, and share of equal values in the last pages")
    exact = copy.deepcopy(models.eager).float()
    exact.config.num_hidden_layers = CHECKED_LAYERS
    results = []
    for num_tokens in TOKENS:
        step = make_step(num_tokens)
        right = exact.model(
            input_ids=step.input_ids[None], position_ids=step.positions[None], use_cache=False, pages=None
        ).last_hidden_state[0]
        with num_layers(models, CHECKED_LAYERS) as fused:
            eager = run_eager(models, step)
            last = CHECKED_LAYERS - 1
            page, offset = step.slots // PAGE_SIZE, step.slots % PAGE_SIZE
            eager_keys = models.keys[last][page, :, offset].clone()
            models.keys[last].zero_()
            ours = run_fused(models, fused, step)
        result = {
            "tokens": num_tokens,
            "fused_distance": distance(ours, right),
            "eager_distance": distance(eager, right),
            "keys_distance": distance(models.keys[last][page, :, offset], eager_keys),
            "equal_keys": (models.keys[last][page, :, offset] == eager_keys).float().mean().item(),
        }
        results.append(result)
        print("  " + "  ".join(f"{name} {value:.3g}" for name, value in result.items()), flush=True)
        if not result["fused_distance"] <= 1.2 * result["eager_distance"] + 1e-6:
            raise SystemExit("the fused model is further from float32 than eager is")
        if not result["keys_distance"] < 0.05:
            raise SystemExit("the fused model writes other keys than eager")
    return results


def check_kernels(models: Models) -> Result:
    """Shares of values whose bits differ from eager's on the same input. Rows must be independent."""
    step, base = make_step(max(TOKENS)), models.eager.model
    x, residual, qkv, gate_up = (
        torch.randn(len(step.slots), width, device=DEVICE).to(DTYPE)
        for width in (HIDDEN, HIDDEN, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM, 2 * INTERMEDIATE)
    )
    norm = copy.deepcopy(base.norm)
    norm.weight.data = torch.randn(HIDDEN, device=DEVICE).to(DTYPE)
    keys, values, half = models.keys[0], models.values[0], HEAD_DIM // 2

    def run(rows: slice) -> tuple[torch.Tensor, ...]:
        cos, sin = rotary_tables(step.positions[rows], models.fused.inv_freq, 1.0, DTYPE)
        normed, summed = add_rms_norm(x[rows], residual[rows], norm.weight, norm.variance_epsilon)
        query = rope_kv(qkv[rows], cos, sin, keys, values, step.slots[rows])
        return summed, normed, cos, sin, query, silu_mul(gate_up[rows])

    gate, up = gate_up.split(INTERMEDIATE, 1)
    right_cos, right_sin = (table[0] for table in base.rotary_emb(x, step.positions[None]))
    states = qkv[:, : QUERY_HEADS * HEAD_DIM].unflatten(1, (-1, HEAD_DIM))
    right_query, _ = apply_rotary_pos_emb(states, states, right_cos, right_sin, unsqueeze_dim=1)
    right = (
        x + residual, norm(x + residual), right_cos[:, :half], right_sin[:, :half], right_query,
        silu(gate) * up,
    )  # fmt: skip
    names = ("sum", "norm", "cos", "sin", "query", "silu_mul")
    ours = run(slice(None))
    result = {
        name: (one != other).float().mean().item()
        for name, one, other in zip(names, ours, right, strict=True)
    }
    print("share of values that differ from eager's in their bits")
    print("  " + "  ".join(f"{name} {value:.2e}" for name, value in result.items()), flush=True)
    if not max(result.values()) < 2e-3:
        raise SystemExit("a kernel differs from eager in more than a last bit here and there")
    for rows in (slice(3, 4), slice(5, 12), slice(64, 128)):
        if not all(torch.equal(a, b[rows]) for a, b in zip(run(rows), ours, strict=True)):
            raise SystemExit("a kernel's rows depend on each other")
    return result


# ------------------------------------------------------------------------- time


def median_us(launch: Callable[[], object], replays: int = 15) -> float:
    """Microseconds of everything that launch() queues, captured once: the median over replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()  # compiled, and libraries' workspaces made, before capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        launch()
        graph.capture_end()
        times = []
        for replay in range(replays + 3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # The graph is queued while the GPU is busy: its launch by the host is not in the figure.
            torch.cuda._sleep(400_000)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 3:
                times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def layer_us(models: Models, run: Callable[[FusedModel], object]) -> float:
    times = []
    for count in (MANY_LAYERS, FEW_LAYERS):
        with num_layers(models, count) as fused:
            times.append(median_us(lambda fused=fused: run(fused)))  # type: ignore[misc]
    return (times[0] - times[1]) / (MANY_LAYERS - FEW_LAYERS)


def time_layer(models: Models, num_tokens: int) -> Result:
    step = make_step(num_tokens)
    inputs = {
        width: torch.randn(num_tokens, width, device=DEVICE).to(DTYPE) for width in (HIDDEN, INTERMEDIATE)
    }
    products: dict[str, list[torch.Tensor]] = {
        "qkv": [layer.qkv.weight for layer in models.fused.layers],
        "output": [layer.output.weight for layer in models.fused.layers],
        "gate_up": [layer.gate_up.weight for layer in models.fused.layers],
        "down": [layer.down.weight for layer in models.fused.layers],
    }
    layers = list(zip(*products.values(), strict=True))
    apart = [
        [
            layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight,
            layer.self_attn.o_proj.weight, layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight,
            layer.mlp.down_proj.weight,
        ]
        for layer in models.eager.model.layers
    ]  # fmt: skip

    def multiply(weights: Any) -> None:
        for weight in weights:
            linear(inputs[weight.shape[1]], weight)

    def us(weights_of_layers: Any) -> float:
        return median_us(lambda: [multiply(weights) for weights in weights_of_layers]) / MANY_LAYERS

    result: Result = {
        "tokens": num_tokens,
        "fused": layer_us(models, lambda fused: run_fused(models, fused, step)),
        "fused_products": us(layers),
        "eager": layer_us(models, lambda _: run_eager(models, step)),
        "eager_products": us(apart),
    }
    result |= {f"{name}_product": us([[w] for w in weights]) for name, weights in products.items()}
    result["fused_rest"] = result["fused"] - result["fused_products"]
    result["eager_rest"] = result["eager"] - result["eager_products"]
    return result


def time_layers(models: Models) -> list[Result]:
    weight_bytes = sum(p.numel() for p in models.eager.model.layers[0].parameters()) * DTYPE.itemsize
    print("\na decoder layer without attention, us; TB/s of its weights")
    print(
        f"{'tokens':>7} {'eager':>7} {'fused':>7} {'ratio':>6} {'products':>9} {'rest':>6} {'eager rest':>11}"
        f" {'TB/s':>5}   one by one: qkv, output, gate_up, down"
    )
    results = []
    for num_tokens in TOKENS:
        result = time_layer(models, num_tokens)
        results.append(result)
        ones = [result[f"{name}_product"] for name in ("qkv", "output", "gate_up", "down")]
        print(
            f"{num_tokens:>7} {result['eager']:>7.1f} {result['fused']:>7.1f}"
            f" {result['eager'] / result['fused']:>6.2f} {result['fused_products']:>9.1f}"
            f" {result['fused_rest']:>6.1f} {result['eager_rest']:>11.1f}"
            f" {weight_bytes / result['fused'] / 1e6:>5.2f}   {', '.join(f'{us:.1f}' for us in ones)}",
            flush=True,
        )
    return results


def kernel_launches(models: Models, num_tokens: int) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Kernel, launch, call: the default launch of each kernel first."""
    step = make_step(num_tokens)
    x, residual, qkv, gate_up = (
        torch.randn(num_tokens, width, device=DEVICE).to(DTYPE)
        for width in (HIDDEN, HIDDEN, (QUERY_HEADS + 2 * KV_HEADS) * HEAD_DIM, 2 * INTERMEDIATE)
    )
    norm, fused, keys, values = models.fused.norm, models.fused, models.keys[0], models.values[0]
    cos, sin = rotary_tables(step.positions, fused.inv_freq, fused.rope_scaling, DTYPE)
    yield "tables", "", lambda: rotary_tables(step.positions, fused.inv_freq, fused.rope_scaling, DTYPE)
    for warps in (8, 4, 16):
        yield (
            "add_rms_norm",
            f"{warps} warps",
            lambda warps=warps: add_rms_norm(x, residual, norm.weight, norm.eps, num_warps=warps),  # type: ignore[misc]
        )
    head_norm = torch.ones(HEAD_DIM, device=DEVICE, dtype=DTYPE)
    both = {"query_norm": head_norm, "key_norm": head_norm, "eps": norm.eps}
    launches = [(8, 2), (4, 1), (4, 2), (8, 1), (8, 4), (16, 2), (16, 4), (2, 1)]
    for name, norms in (("rope_kv", {}), ("rope_kv with norms", both)):
        for heads, warps in launches:
            yield (
                name,
                f"{heads} heads, {warps} warps",
                lambda heads=heads, warps=warps, norms=norms: rope_kv(  # type: ignore[misc]
                    qkv, cos, sin, keys, values, step.slots, heads_per_program=heads, num_warps=warps, **norms
                ),
            )
    for block, warps in (
        (1024, 4),
        (512, 2),
        (512, 4),
        (1024, 2),
        (1024, 8),
        (2048, 4),
        (2048, 8),
        (4096, 8),
    ):
        yield (
            "silu_mul",
            f"block {block}, {warps} warps",
            lambda block=block, warps=warps: silu_mul(gate_up, block=block, num_warps=warps),  # type: ignore[misc]
        )


def time_kernels(models: Models) -> list[Result]:
    print("\nthe kernels one by one, us: the default launch, and the best of the others")
    results: list[Result] = []
    for num_tokens in TOKENS:
        times: dict[str, list[tuple[float, str]]] = {}
        for kernel, launch, call in kernel_launches(models, num_tokens):
            us = median_us(lambda call=call: [call() for _ in range(LAUNCHES_PER_GRAPH)])  # type: ignore[misc]
            times.setdefault(kernel, []).append((us / LAUNCHES_PER_GRAPH, launch))
            results.append(
                {"kernel": kernel, "launch": launch, "tokens": num_tokens, "us": us / LAUNCHES_PER_GRAPH}
            )
        texts = []
        for kernel, swept in times.items():
            best = min(swept)
            texts.append(
                f"{kernel} {swept[0][0]:.2f}" + (f" (best {best[0]:.2f}: {best[1]})" * (len(swept) > 1))
            )
        print(f"  {num_tokens:>4} tokens: " + "; ".join(texts), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--no-sweep", action="store_true", help="leave the kernels' other launches out")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("fused_layers.py times a GPU, and here is none")
    torch.manual_seed(0)
    results: Result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }
    print(*results.values(), sep=", ")
    with torch.inference_mode():
        models = make_models()
        results["differing"] = check_kernels(models)
        results["checks"] = check_model(models)
        torch.cuda.empty_cache()
        results["layers"] = time_layers(models)
        if not arguments.no_sweep:
            results["kernels"] = time_kernels(models)
    target = Path(os.environ.get("OUT", ".")) / "fused_layers.json"
    target.write_text(json.dumps(results, indent=1))
    print(f"\nresults in {target}")


if __name__ == "__main__":
    main()
