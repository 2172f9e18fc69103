"""Walks the layers of a common model with fused kernels in place of transformers' modules.

For Llama, Qwen2, Qwen3 and Mistral, and every model that is made of their classes: nine launches a layer.
Whether a model is one of them is read from its modules (class, activation, hooks, parameters), never from its
name; whoever deviates in any way that the walk does not know is left to transformers. The projections are
joined in place: the modules' own parameters become slices of the joined ones, so that the model still works,
its state dict is what it was, and no weight is kept twice.

Knows modules and kernels; refuses to know how attention is computed, and sequences. Importing it imports
triton.

Shapes: T = tokens, Hq = query heads, H = KV heads, D = head width, N = pages, P = page size, W = hidden
width, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from pipeline.kernels.rms_norm import add_rms_norm
from pipeline.kernels.rope_kv import rope_kv, rotary_tables
from pipeline.kernels.silu_mul import silu_mul

# (layer, query [T, Hq, D], sliding window) -> [T, Hq, D], over the pages that the layer has just written to.
Attend = Callable[[int, torch.Tensor, int | None], torch.Tensor]

# RoPE whose frequencies never change: the others look at the batch's longest row.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class FusedContext:
    """Where a step's keys and values go, and how it attends.

    keys, values: per layer [N, H, P, D]. slot_mappings: by sliding window (None: full attention), int64 [T];
    a negative slot writes nothing.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    slot_mappings: Mapping[int | None, torch.Tensor]
    attend: Attend


@dataclass(frozen=True)
class Norm:
    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Projection:
    """weight [out, in], bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class FusedLayer:
    """window: positions a query sees, itself included; None for all. head_norms: of query and key."""

    window: int | None
    input_norm: Norm
    qkv: Projection
    head_norms: tuple[Norm, Norm] | None
    output: Projection
    mlp_norm: Norm
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class FusedModel:
    """scale: what attention multiplies its scores by."""

    embedding: torch.Tensor
    layers: tuple[FusedLayer, ...]
    norm: Norm
    head: Projection
    inv_freq: torch.Tensor
    rope_scaling: float
    scale: float

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: FusedContext
    ) -> torch.Tensor:
        """input_ids [T], positions [T] -> hidden [T, W], after the final norm."""
        hidden = F.embedding(input_ids, self.embedding)
        cos, sin = rotary_tables(positions, self.inv_freq, self.rope_scaling, hidden.dtype)
        residual = None
        for index, layer in enumerate(self.layers):
            normed, residual = add_rms_norm(hidden, residual, layer.input_norm.weight, layer.input_norm.eps)
            query = _query(index, layer, layer.qkv(normed), cos, sin, context)
            hidden = layer.output(context.attend(index, query, layer.window).flatten(1))
            normed, residual = add_rms_norm(hidden, residual, layer.mlp_norm.weight, layer.mlp_norm.eps)
            hidden = layer.down(silu_mul(layer.gate_up(normed)))
        return add_rms_norm(hidden, residual, self.norm.weight, self.norm.eps)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result [N, W] -> [N, V]."""
        return self.head(hidden)


def _query(
    index: int,
    layer: FusedLayer,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    context: FusedContext,
) -> torch.Tensor:
    """[T, Hq, D]; keys and values are in their pages then."""
    keys, values, slots = context.keys[index], context.values[index], context.slot_mappings[layer.window]
    if layer.head_norms is None:
        return rope_kv(qkv, cos, sin, keys, values, slots)
    query_norm, key_norm = layer.head_norms
    return rope_kv(
        qkv,
        cos,
        sin,
        keys,
        values,
        slots,
        query_norm=query_norm.weight,
        key_norm=key_norm.weight,
        eps=query_norm.eps,
    )


# ------------------------------------------------------------------------- which models


@dataclass(frozen=True)
class _Family:
    """The classes that a model consists of. window: of an attention module, as its forward takes it."""

    model: type[nn.Module]
    base: type[nn.Module]
    layer: type[nn.Module]
    attention: type[nn.Module]
    mlp: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]
    window: Callable[[Any], int | None]
    head_norms: bool = False

    @property
    def classes(self) -> set[type[nn.Module]]:
        own = {self.model, self.base, self.layer, self.attention, self.mlp, self.norm, self.rotary}
        return own | {nn.ModuleList, nn.Embedding, nn.Linear, nn.SiLU, type(ACT2FN["silu"])}


def _family(module: Any, name: str, window: Callable[[Any], int | None], head_norms: bool = False) -> _Family:
    def named(part: str) -> type[nn.Module]:
        return getattr(module, name + part)

    return _Family(
        named("ForCausalLM"),
        named("Model"),
        named("DecoderLayer"),
        named("Attention"),
        named("MLP"),
        named("RMSNorm"),
        named("RotaryEmbedding"),
        window,
        head_norms,
    )


_FAMILIES = (
    _family(llama, "Llama", lambda attention: None),
    _family(qwen2, "Qwen2", lambda attention: attention.sliding_window),
    _family(qwen3, "Qwen3", lambda attention: attention.sliding_window, head_norms=True),
    _family(mistral, "Mistral", lambda attention: attention.config.sliding_window),
)


def _family_of(model: nn.Module) -> _Family | None:
    return next((family for family in _FAMILIES if type(model) is family.model), None)


def why_not_fused(model: Any) -> str | None:
    """What about the model the fused walk does not know; None if it can be fused."""
    return next(_deviations(model), None)


def _deviations(model: Any) -> Iterator[str]:
    """Each check relies on those before it; only the first is ever asked for."""
    family = _family_of(model)
    if family is None:
        known = ", ".join(family.model.__name__ for family in _FAMILIES)
        yield f"{type(model).__name__} is none of {known}"
        return
    for name, module in model.named_modules():
        yield from _module_deviations(name or type(model).__name__, module, family)
    yield from _parameter_deviations(model)
    yield from _layer_deviations(model)
    yield from _rope_deviations(model.model)


def _module_deviations(name: str, module: nn.Module, family: _Family) -> Iterator[str]:
    if type(module) not in family.classes:
        # Another activation, a quantised or adapted Linear, a norm of another kind.
        yield f"{name} is of class {type(module).__name__}"
    if module._forward_hooks or module._forward_pre_hooks:
        yield f"{name} has hooks"
    if "forward" in vars(module):
        yield f"{name} has a forward of its own"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        yield f"{name} renormalises its rows"


def _parameter_deviations(model: Any) -> Iterator[str]:
    first = model.model.embed_tokens.weight
    if first.dtype not in _DTYPES:
        yield f"the weights are {first.dtype}"
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # Quantised and sharded tensors are classes of their own.
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            yield f"{name} is of class {type(parameter).__name__}"
        if parameter.dtype != first.dtype or parameter.device != first.device:
            yield f"{name} is {parameter.dtype} on {parameter.device}, not {first.dtype} on {first.device}"
        # The head may be the embedding.
        if id(parameter) in seen and parameter is not first:
            yield f"{name} is used twice"
        seen.add(id(parameter))


def _layer_deviations(model: Any) -> Iterator[str]:
    layers = model.model.layers
    if len(layers) != model.config.num_hidden_layers:
        yield f"it has {len(layers)} layers and runs {model.config.num_hidden_layers}"
    for index, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        if attention.layer_idx != index:
            yield f"layer {index} calls itself {attention.layer_idx}"
        if attention.scaling != layers[0].self_attn.scaling:
            yield f"layer {index} scales its scores by {attention.scaling}"
        head_norms = [child for name, child in attention.named_children() if name.endswith("_norm")]
        if len({norm.variance_epsilon for norm in head_norms}) > 1:
            yield f"layer {index} norms query and key with an eps each"
        if attention.head_dim % 2 or attention.q_proj.out_features % attention.head_dim:
            yield f"layer {index} has heads of {attention.head_dim}"
        for joined in (_qkv(attention), _gate_up(mlp)):
            if len({linear.bias is None for linear in joined}) > 1:
                yield f"layer {index} has a bias in some of its joined projections only"


def _rope_deviations(base: Any) -> Iterator[str]:
    rotary = base.rotary_emb
    if rotary.rope_type not in _STATIC_ROPE:
        yield f"its RoPE is of type {rotary.rope_type}"
    if rotary.inv_freq.shape != (base.layers[0].self_attn.head_dim // 2,):
        yield f"its RoPE turns {2 * len(rotary.inv_freq)} dimensions of a head"


# ------------------------------------------------------------------------- fusing


def fuse(model: Any) -> FusedModel:
    """Join the model's projections in place. ValueError with the reason if `why_not_fused` has one.

    The model must be where it will run: moving or casting it afterwards takes its weights apart again.
    """
    reason = why_not_fused(model)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} cannot run through the fused kernels: {reason}")
    family = _family_of(model)
    assert family is not None
    base = model.model
    # The joined tensors become the parameters' memory: they must be of the same kind, whatever mode this is.
    with torch.inference_mode(base.embed_tokens.weight.is_inference()), torch.no_grad():
        return FusedModel(
            embedding=base.embed_tokens.weight.detach(),
            layers=tuple(_fuse_layer(layer, family) for layer in base.layers),
            norm=_norm(base.norm),
            head=_projection(model.lm_head),
            inv_freq=base.rotary_emb.inv_freq.detach().float().contiguous(),
            rope_scaling=float(base.rotary_emb.attention_scaling),
            scale=float(base.layers[0].self_attn.scaling),
        )


def _fuse_layer(layer: Any, family: _Family) -> FusedLayer:
    attention = layer.self_attn
    return FusedLayer(
        window=family.window(attention),
        input_norm=_norm(layer.input_layernorm),
        qkv=_joined(_qkv(attention)),
        head_norms=(_norm(attention.q_norm), _norm(attention.k_norm)) if family.head_norms else None,
        output=_projection(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_joined(_gate_up(layer.mlp)),
        down=_projection(layer.mlp.down_proj),
    )


def _qkv(attention: Any) -> list[nn.Linear]:
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def _gate_up(mlp: Any) -> list[nn.Linear]:
    return [mlp.gate_proj, mlp.up_proj]


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), float(module.variance_epsilon))


def _projection(linear: nn.Linear) -> Projection:
    return Projection(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def _joined(linears: list[nn.Linear]) -> Projection:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Projection(_join([linear.weight for linear in linears]), _join(biases) if biases else None)


def _join(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all rows, of which the parameters are slices from now on."""
    joined = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, rows in zip(parameters, joined.split([len(p) for p in parameters]), strict=True):
        parameter.data = rows
    return joined
