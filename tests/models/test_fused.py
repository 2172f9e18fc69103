"""Fused models compute what transformers' modules do, keep their state, and refuse what they do not know."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.activations import ACT2FN

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)
_triton = sys.modules.get("triton")
if not torch.cuda.is_available() and not (_triton and _triton.knobs.runtime.interpret):
    # As for the kernels' own tests, unless these have been collected already.
    importlib.import_module("kernels.conftest")

from pipeline.models.fused import FusedContext, FusedModel, fuse, why_not_fused  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE_SIZE, WINDOW, RANGE = 16, 5, 64
ROW_LENGTHS = (9, 14)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ALTERNATING = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention"],
}
SIZES = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": RANGE,
    "initializer_range": 0.2,
    # So large that a forgotten one shows.
    "rms_norm_eps": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_model(config_class: type = LlamaConfig, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = config_class(**{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            # Ones and zeros as they begin would hide a forgotten weight.
            nn.init.normal_(parameter, 0.5, 0.5)
    return model.eval().to(DEVICE)


class Pages:
    """A page per row and layer, and attention over it by definition, token by token."""

    def __init__(self, fused: FusedModel, config: Any) -> None:
        head_dim = 2 * len(fused.inv_freq)
        shape = (len(ROW_LENGTHS), config.num_key_value_heads, PAGE_SIZE, head_dim)
        self.keys, self.values = (
            [torch.full(shape, float("nan"), device=DEVICE) for _ in fused.layers] for _ in range(2)
        )
        self._scale = fused.scale
        self._windows = {layer.window for layer in fused.layers}

    @staticmethod
    def page(row: int, window: int | None) -> int:
        """Layers with a window have their rows' pages in another order."""
        return row if window is None else len(ROW_LENGTHS) - 1 - row

    def context(self, rows: list[int | None], positions: list[int]) -> FusedContext:
        """Row and position of each token; None is padding, and nothing of it may be kept."""

        def slots(window: int | None) -> torch.Tensor:
            numbers = [
                -1 if row is None else self.page(row, window) * PAGE_SIZE + position
                for row, position in zip(rows, positions, strict=True)
            ]
            return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)

        def attend(layer: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
            out = torch.zeros_like(query)
            for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
                if row is not None:
                    first = 0 if window is None else max(0, position + 1 - window)
                    page = self.page(row, window)
                    out[token] = self._attend(layer, query[token], page, first, position + 1)
            return out

        return FusedContext(self.keys, self.values, {w: slots(w) for w in self._windows}, attend)

    def _attend(self, layer: int, query: torch.Tensor, page: int, first: int, stop: int) -> torch.Tensor:
        keys, values = (t[layer][page, :, first:stop] for t in (self.keys, self.values))
        group = len(query) // len(keys)
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        weights = (torch.einsum("hd,hpd->hp", query, keys) * self._scale).softmax(-1)
        return torch.einsum("hp,hpd->hd", weights, values)


def run_in_two_steps(model: Any, fused: FusedModel, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Hidden states of each row: all rows packed, padding between them; the last token in a second step."""
    pages = Pages(fused, model.config)
    hidden: list[list[torch.Tensor]] = [[] for _ in rows]
    for step in (slice(0, -1), slice(-1, None)):
        ids: list[int] = []
        owners: list[int | None] = []
        positions: list[int] = []
        for row, tokens in enumerate(rows):
            ids += [*tokens[step].tolist(), 0]
            positions += [*torch.arange(len(tokens))[step].tolist(), 0]
            owners += [row] * len(tokens[step]) + [None]
        out = fused.forward(
            torch.tensor(ids, device=DEVICE),
            torch.tensor(positions, device=DEVICE),
            pages.context(owners, positions),
        )
        for row in range(len(rows)):
            hidden[row].append(out[[i for i, owner in enumerate(owners) if owner == row]])
    return [torch.cat(parts) for parts in hidden]


@pytest.mark.parametrize(
    ("config_class", "settings", "windows"),
    [
        (LlamaConfig, {}, [None, None]),
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}, [None, None]),
        (LlamaConfig, {"head_dim": 20, "rope_parameters": YARN, "tie_word_embeddings": True}, [None, None]),
        (Qwen2Config, {}, [None, None]),
        (Qwen2Config, ALTERNATING, [None, WINDOW]),
        (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}, [None, None]),
        (Qwen3Config, {"head_dim": 16, "attention_bias": True, **ALTERNATING}, [None, WINDOW]),
        (MistralConfig, {"sliding_window": WINDOW, "head_dim": 16}, [WINDOW, WINDOW]),
        (MistralConfig, {"sliding_window": None}, [None, None]),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@torch.inference_mode()
def test_hidden_states_and_logits_equal_transformers(config_class, settings, windows):
    model = make_model(config_class, **settings)
    rows = [torch.arange(length) * 7 % SIZES["vocab_size"] for length in ROW_LENGTHS]
    # Before it is fused. Asked of the whole model, hidden states would come by hooks, which stay on it.
    right = [model.model(row[None].to(DEVICE), use_cache=False).last_hidden_state[0] for row in rows]
    right_logits = [model(row[None].to(DEVICE), use_cache=False).logits[0] for row in rows]
    fused = fuse(model)
    assert [layer.window for layer in fused.layers] == windows
    hidden = run_in_two_steps(model, fused, rows)
    for got, expected, logits in zip(hidden, right, right_logits, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(fused.logits(got), logits, rtol=0, atol=2e-5)
    # The model itself still works; it was made in this mode, and its parameters are slices now.
    torch.testing.assert_close(model(rows[0][None].to(DEVICE), use_cache=False).logits[0], right_logits[0])


def test_the_model_keeps_its_state_and_its_weights_lie_in_memory_once():
    model = make_model(Qwen2Config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    ids = torch.arange(6, device=DEVICE)[None]
    with torch.no_grad():
        logits = model(ids).logits
    fused = fuse(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) and after[name].is_contiguous() for name in before)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    for joined, parts in [
        (fused.layers[1].qkv.weight, [attention.q_proj, attention.k_proj, attention.v_proj]),
        (fused.layers[1].gate_up.weight, [mlp.gate_proj, mlp.up_proj]),
    ]:
        assert torch.equal(joined, torch.cat([part.weight for part in parts]))
        assert {p.weight.untyped_storage().data_ptr() for p in parts} == {joined.untyped_storage().data_ptr()}
    assert fused.layers[1].qkv.bias is not None
    # New weights that are loaded into the model are the fused one's as well.
    model.load_state_dict({name: 2 * tensor for name, tensor in before.items()})
    assert torch.equal(fused.layers[1].qkv.weight[:48], 2 * before["model.layers.1.self_attn.q_proj.weight"])
    # Once more, as after a second start in the same process.
    again = fuse(model)
    assert torch.equal(again.layers[0].gate_up.weight, fused.layers[0].gate_up.weight)


def _other_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = ACT2FN["gelu"]


def _hook(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *arguments: None)


def _pre_hook(model: Any) -> None:
    model.lm_head.register_forward_pre_hook(lambda *arguments: None)


def _own_forward(model: Any) -> None:
    model.model.norm.forward = lambda x: x


def _quantised(model: Any) -> None:
    class EightBitLinear(nn.Linear):
        pass

    model.model.layers[1].mlp.down_proj = EightBitLinear(40, 48, bias=False)


def _sharded(model: Any) -> None:
    class Shard(torch.Tensor):
        pass

    weight = model.model.layers[0].self_attn.o_proj.weight
    del model.model.layers[0].self_attn.o_proj.weight
    model.model.layers[0].self_attn.o_proj.weight = nn.Parameter(weight.detach().as_subclass(Shard))


def _other_norm(model: Any) -> None:
    model.model.norm = nn.LayerNorm(48)


def _mixed_types(model: Any) -> None:
    model.model.layers[1].input_layernorm.bfloat16()


def _double(model: Any) -> None:
    model.double()


def _bias_of_one(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = nn.Parameter(torch.zeros(24))


def _shared(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def _fewer_layers(model: Any) -> None:
    model.config.num_hidden_layers = 1


def _other_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.5


def _renormalised(model: Any) -> None:
    model.model.embed_tokens.max_norm = 1.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_other_activation, "model.layers.0.mlp.act_fn is of class GELUActivation"),
        (_hook, "model.layers.1 has hooks"),
        (_pre_hook, "lm_head has hooks"),
        (_own_forward, "model.norm has a forward of its own"),
        (_quantised, "model.layers.1.mlp.down_proj is of class EightBitLinear"),
        (_sharded, "model.layers.0.self_attn.o_proj.weight is of class Shard"),
        (_other_norm, "model.norm is of class LayerNorm"),
        (_mixed_types, "model.layers.1.input_layernorm.weight is torch.bfloat16"),
        (_double, "the weights are torch.float64"),
        (_bias_of_one, "layer 1 has a bias in some of its joined projections only"),
        (_shared, "model.layers.1.mlp.up_proj.weight is used twice"),
        (_fewer_layers, "it has 2 layers and runs 1"),
        (_other_scale, "layer 1 scales its scores by 0.5"),
        (_renormalised, "model.embed_tokens renormalises its rows"),
    ],
)
def test_a_changed_module_is_refused_by_name(change: Callable[[Any], None], reason: str):
    model = make_model()
    assert why_not_fused(model) is None
    weight = model.model.layers[0].self_attn.q_proj.weight.data_ptr()
    change(model)
    assert (why_not_fused(model) or "").startswith(reason)
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot run through the fused kernels"):
        fuse(model)
    # Refused before anything was joined.
    assert change is _double or model.model.layers[0].self_attn.q_proj.weight.data_ptr() == weight


@pytest.mark.parametrize(
    ("config_class", "settings", "reason"),
    [
        (GemmaConfig, {"head_dim": 12}, "GemmaForCausalLM is none of LlamaForCausalLM, "),
        (LlamaConfig, {"hidden_act": "gelu"}, "model.layers.0.mlp.act_fn is of class GELUActivation"),
        (LlamaConfig, {"rope_parameters": {**YARN, "rope_type": "dynamic"}}, "its RoPE is of type dynamic"),
        (
            LlamaConfig,
            {
                "rope_parameters": {
                    **YARN,
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 6,
                    "long_factor": [4.0] * 6,
                }
            },
            "its RoPE is of type longrope",
        ),
    ],
)
def test_other_configurations_are_refused(config_class, settings, reason):
    assert (why_not_fused(make_model(config_class, **settings)) or "").startswith(reason)


def test_a_subclass_may_do_anything_and_is_refused():
    model = make_model()
    norm = model.model.norm
    norm.__class__ = type("LlamaRMSNorm", (type(norm),), {"forward": lambda self, x: F.relu(x)})
    assert why_not_fused(model) == "model.norm is of class LlamaRMSNorm"
