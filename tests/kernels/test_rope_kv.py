"""One launch does what eager does in a dozen: head norms, rotation, and the writing of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernels.paged_cases import DEVICE, random
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

pytest.importorskip("triton", reason="the kernels need triton")

from pipeline.kernels.rope_kv import rope_kv, rotary_tables  # noqa: E402

EPS = 1e-6
PAGE_SIZE = 16
NUM_PAGES = 4
SLOTS = [0, PAGE_SIZE - 1, PAGE_SIZE, NUM_PAGES * PAGE_SIZE - 1, 2 * PAGE_SIZE + 7]
POSITIONS = [0, 1, 17, 4095, 100_000]
INTERPRETED = DEVICE.type != "cuda"
# Of values up to 8. The interpreter rounds bfloat16 towards zero, five times in a row with head norms.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-7, torch.bfloat16: 2**-3 if INTERPRETED else 2**-4}


@dataclass(frozen=True)
class Case:
    """qkv [T, (Hq+2H)*D], cos and sin [T, D/2], norms [D] of query and key."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def norm_arguments(self):
        if self.norms is None:
            return {}
        return {"query_norm": self.norms[0], "key_norm": self.norms[1], "eps": EPS}


def make_case(num_query_heads, num_kv_heads, head_dim, dtype, norms=False) -> Case:
    width = (num_query_heads + 2 * num_kv_heads) * head_dim
    angles = torch.tensor(POSITIONS)[:, None] / 1e4 ** (torch.arange(0, head_dim, 2) / head_dim)
    return Case(
        num_query_heads,
        num_kv_heads,
        head_dim,
        random(len(POSITIONS), width, dtype=dtype),
        angles.cos().to(dtype).to(DEVICE),
        angles.sin().to(dtype).to(DEVICE),
        (random(head_dim, dtype=dtype, seed=4), random(head_dim, dtype=dtype, seed=5)) if norms else None,
    )


def eager(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [T, Hq, D], key and value [T, H, D] by transformers' own functions."""
    heads = case.qkv.unflatten(1, (-1, case.head_dim))
    query, key, value = heads.split([case.num_query_heads, case.num_kv_heads, case.num_kv_heads], 1)
    if case.norms is not None:
        query, key = (_norm(weight)(states) for weight, states in zip(case.norms, (query, key), strict=True))
    cos, sin = (torch.cat([table, table], -1) for table in (case.cos, case.sin))
    return *apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=1), value


def _norm(weight: torch.Tensor) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(len(weight), EPS)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm


def make_pages(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (NUM_PAGES, case.num_kv_heads, PAGE_SIZE, case.head_dim)
    keys, values = (random(*shape, dtype=case.qkv.dtype, seed=seed) for seed in (2, 3))
    return keys, values


def slot_mapping(slots: list[int]) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "head norms"])
@pytest.mark.parametrize(
    ("num_query_heads", "num_kv_heads", "head_dim", "heads_per_program"),
    # Programs that hold one kind of head, that hold several, and more places than heads; widths of no power.
    [(4, 2, 16, 2), (6, 2, 80, 4), (3, 1, 24, 8), (2, 2, 32, 1)],
)
def test_query_keys_and_values_equal_eager(
    dtype, norms, num_query_heads, num_kv_heads, head_dim, heads_per_program
):
    case = make_case(num_query_heads, num_kv_heads, head_dim, dtype, norms)
    keys, values = make_pages(case)
    others_keys, others_values = keys.clone(), values.clone()
    query = rope_kv(
        case.qkv,
        case.cos,
        case.sin,
        keys,
        values,
        slot_mapping(SLOTS),
        heads_per_program=heads_per_program,
        **case.norm_arguments,
    )
    right_query, right_key, right_value = eager(case)
    assert query.is_contiguous()
    # In half types each rounding is eager's; only norms sum in an order of their own.
    exact = not norms and (dtype == torch.float16 or (dtype == torch.bfloat16 and not INTERPRETED))
    close = {"rtol": 0, "atol": 0.0 if exact else TOLERANCE[dtype]}
    torch.testing.assert_close(query, right_query, **close)
    for token, slot in enumerate(SLOTS):
        page, offset = divmod(slot, PAGE_SIZE)
        torch.testing.assert_close(keys[page, :, offset], right_key[token], **close)
        assert torch.equal(values[page, :, offset], right_value[token])
        others_keys[page, :, offset] = keys[page, :, offset]
        others_values[page, :, offset] = values[page, :, offset]
    assert torch.equal(keys, others_keys) and torch.equal(values, others_values)


def test_padding_writes_nothing_and_empty_batches_are_fine():
    case = make_case(4, 2, 16, torch.float32)
    keys, values = make_pages(case)
    before_keys, before_values = keys.clone(), values.clone()
    query = rope_kv(case.qkv, case.cos, case.sin, keys, values, slot_mapping([-1, -16, -1, -17, -100]))
    assert torch.equal(keys, before_keys) and torch.equal(values, before_values)
    torch.testing.assert_close(query, eager(case)[0])
    none = rope_kv(case.qkv[:0], case.cos[:0], case.sin[:0], keys, values, slot_mapping([]))
    assert none.shape == (0, 4, 16) and torch.equal(keys, before_keys)


def test_a_token_does_not_depend_on_its_neighbours_and_may_be_a_slice():
    case = make_case(4, 2, 16, torch.float32, norms=True)
    wide = torch.cat([case.qkv, case.qkv], 1)[:, 64:192]
    keys, values = make_pages(case)
    query = rope_kv(wide, case.cos, case.sin, keys, values, slot_mapping(SLOTS), **case.norm_arguments)
    for token, slot in enumerate(SLOTS):
        own_keys, own_values = make_pages(case)
        row = slice(token, token + 1)
        alone = rope_kv(
            wide[row], case.cos[row], case.sin[row], own_keys, own_values, slot_mapping([slot]),
            **case.norm_arguments,
        )  # fmt: skip
        page, offset = divmod(slot, PAGE_SIZE)
        assert torch.equal(alone[0], query[token])
        assert torch.equal(own_keys[page, :, offset], keys[page, :, offset])
        assert torch.equal(own_values[page, :, offset], values[page, :, offset])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("integer", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e4},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_tables_equal_the_models_own(rope, integer, dtype):
    config = LlamaConfig(
        hidden_size=96, num_attention_heads=4, max_position_embeddings=131_072, rope_parameters=rope
    )
    rotary = LlamaRotaryEmbedding(config).to(DEVICE)
    positions = torch.tensor(POSITIONS, dtype=integer, device=DEVICE)
    cos, sin = rotary_tables(positions, rotary.inv_freq, rotary.attention_scaling, dtype)
    right_cos, right_sin = rotary(torch.empty(0, dtype=dtype, device=DEVICE), positions[None])
    assert (rotary.attention_scaling != 1) == (rope["rope_type"] == "yarn")
    # A unit in the last place: cosines are computed by another library.
    tolerance = {"rtol": 0, "atol": 1e-6 if dtype == torch.float32 else 2**-10}
    torch.testing.assert_close(cos, right_cos[0, :, :12], **tolerance)
    torch.testing.assert_close(sin, right_sin[0, :, 12:], **tolerance)
