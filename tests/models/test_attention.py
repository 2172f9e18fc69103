"""Paged attention against float64, and the operator inside a compiled model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FAMILIES, SLIDING_WINDOW, family_config, random_model

from pipeline.models.attention import ATTENTION_NAME, CpuAttentionContext, GroupContext, paged_attention
from pipeline.models.cpu_attention import plan_tensors

HEAD_DIM = 8
BLOCK_SIZE = 4
SCALE = HEAD_DIM**-0.5
# (positions already in the cache, new positions): decodes, first chunks, later chunks, long ones.
ROWS = [(0, 1), (0, 7), (12, 1), (5, 3), (31, 40), (0, 70), (3, 1), (64, 16)]


class Pages:
    """Rows in shuffled blocks of a cache whose unused places hold large garbage."""

    def __init__(self, rows: list[tuple[int, int]], kv_heads: int, group: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.starts = np.array([start for start, _ in rows], np.int32)
        self.lens = np.array([count for _, count in rows], np.int32)
        totals = self.starts + self.lens
        needed = -(-totals // BLOCK_SIZE)
        order = np.random.default_rng(seed).permutation(np.arange(1, needed.sum() + 5))
        self.tables = np.zeros((len(rows), needed.max()), np.int32)
        taken = 0
        for row, count in enumerate(needed):
            self.tables[row, :count] = order[taken : taken + count]
            taken += count
        size = (int(needed.sum()) + 5, kv_heads, BLOCK_SIZE, HEAD_DIM)
        self.keys, self.values = 100 * normal(*size), 100 * normal(*size)
        self.row_keys = [normal(kv_heads, n, HEAD_DIM) for n in totals]
        self.row_values = [normal(kv_heads, n, HEAD_DIM) for n in totals]
        self.query = normal(int(self.lens.sum()), kv_heads * group, HEAD_DIM)
        for row, start in enumerate(self.starts):
            for position in range(start):
                block, offset = self.place(row, position)
                self.keys[block, :, offset] = self.row_keys[row][:, position]
                self.values[block, :, offset] = self.row_values[row][:, position]

    def place(self, row: int, position: int) -> tuple[int, int]:
        return int(self.tables[row, position // BLOCK_SIZE]), position % BLOCK_SIZE

    def new_positions(self) -> Iterator[tuple[int, int]]:
        for row, (start, count) in enumerate(zip(self.starts, self.lens, strict=True)):
            for position in range(start, start + count):
                yield row, position

    def attend(
        self, *, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        kv_heads = self.keys.shape[1]
        plans = plan_tensors(
            self.starts,
            self.lens,
            self.tables,
            block_size=BLOCK_SIZE,
            group_size=self.query.shape[1] // kv_heads,
            window=window,
        )
        places = [self.place(row, position) for row, position in self.new_positions()]
        return paged_attention(
            self.query,
            torch.stack([self.row_keys[r][:, p] for r, p in self.new_positions()]),
            torch.stack([self.row_values[r][:, p] for r, p in self.new_positions()]),
            self.keys,
            self.values,
            torch.tensor([block * BLOCK_SIZE + offset for block, offset in places]),
            plans,
            SCALE,
            softcap,
            sinks,
        )

    def reference(
        self, *, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One query at a time in float64, from the definition."""
        group = self.query.shape[1] // self.keys.shape[1]
        out = torch.empty(self.query.shape, dtype=torch.float64)
        for flat, (row, position) in enumerate(self.new_positions()):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(self.query.shape[1]):
                keys = self.row_keys[row][head // group, first : position + 1].double()
                values = self.row_values[row][head // group, first : position + 1].double()
                scores = keys @ self.query[flat, head].double() * SCALE
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                sink = torch.tensor([-torch.inf if sinks is None else float(sinks[head])]).double()
                weights = torch.cat([scores, sink]).softmax(0)[:-1]
                out[flat, head] = weights @ values
        return out


@pytest.mark.parametrize("group", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("window", [None, 1, 6, 33])
def test_equals_float64(group: int, window: int | None) -> None:
    pages = Pages(ROWS, kv_heads=2, group=group)
    torch.testing.assert_close(
        pages.attend(window=window).double(), pages.reference(window=window), atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 6])
def test_softcap_and_sinks_equal_float64(group: int, window: int | None) -> None:
    pages = Pages(ROWS, kv_heads=2, group=group)
    # One sink far below, some beside and one far above the scores.
    sinks = torch.linspace(-30, 40, 2 * group)
    for softcap, used in ((1.5, None), (None, sinks), (0.7, sinks)):
        got = pages.attend(window=window, softcap=softcap, sinks=used).double()
        expected = pages.reference(window=window, softcap=softcap, sinks=used)
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        plain = pages.attend(window=window).double()
        assert not torch.allclose(plain, expected, atol=1e-2), "the feature must make a difference"


def test_new_keys_and_values_land_in_their_places_and_nowhere_else() -> None:
    pages = Pages(ROWS, kv_heads=2, group=2)
    before = pages.keys.clone(), pages.values.clone()
    pages.attend()
    written = torch.zeros(pages.keys.shape[0], BLOCK_SIZE, dtype=torch.bool)
    for row, position in pages.new_positions():
        block, offset = pages.place(row, position)
        written[block, offset] = True
        assert torch.equal(pages.keys[block, :, offset], pages.row_keys[row][:, position])
        assert torch.equal(pages.values[block, :, offset], pages.row_values[row][:, position])
    untouched = ~written[:, None, :, None].expand_as(pages.keys)
    assert torch.equal(pages.keys[untouched], before[0][untouched])
    assert torch.equal(pages.values[untouched], before[1][untouched])


@pytest.mark.parametrize("group", [1, 3, 7, 8])
@pytest.mark.parametrize("window", [None, 6])
def test_a_position_has_the_same_bits_alone_in_a_chunk_and_in_company(group: int, window: int | None) -> None:
    """The last position of a 71-token row: as a decode, in a chunk of 5, of 40, and at once."""
    whole = Pages([(0, 71)], kv_heads=2, group=group)
    expected = whole.attend(window=window)[-1]
    for chunk in (1, 5, 40):
        rows = [(71 - chunk, chunk), (4, 1), (0, 30)]
        mixed = Pages(rows, kv_heads=2, group=group, seed=chunk)
        mixed.row_keys[0], mixed.row_values[0] = whole.row_keys[0], whole.row_values[0]
        mixed.query[:chunk] = whole.query[71 - chunk :]
        for position in range(71 - chunk):
            block, offset = mixed.place(0, position)
            mixed.keys[block, :, offset] = whole.row_keys[0][:, position]
            mixed.values[block, :, offset] = whole.row_values[0][:, position]
        assert torch.equal(mixed.attend(window=window)[chunk - 1], expected), chunk


def test_half_precision_caches_are_near() -> None:
    pages = Pages(ROWS, kv_heads=2, group=2)
    expected = pages.reference()
    for name in ("keys", "values", "query"):
        setattr(pages, name, getattr(pages, name).bfloat16())
    pages.row_keys = [k.bfloat16() for k in pages.row_keys]
    pages.row_values = [v.bfloat16() for v in pages.row_values]
    got = pages.attend()
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), expected, atol=5e-2, rtol=5e-2)


# ---------------------------------------------------------------- inside a model


def packed(model: Any, lengths: tuple[int, ...]) -> dict[str, Any]:
    """Rows beside each other, each in blocks of its own, as keyword arguments of the model."""
    config = model.config
    lens = np.array(lengths, np.int32)
    needed = -(-lens // 16)
    tables = np.zeros((len(lens), needed.max()), np.int32)
    ends = 1 + np.cumsum(needed)
    for row, count in enumerate(needed):
        tables[row, :count] = np.arange(ends[row] - count, ends[row])
    kv_heads = config.num_key_value_heads
    slots = np.concatenate(
        [tables[r, np.arange(n) // 16] * 16 + np.arange(n) % 16 for r, n in enumerate(lens)]
    )
    size = (int(ends[-1]), kv_heads, 16, config.head_dim)
    layers = range(config.num_hidden_layers)
    groups = {
        window: GroupContext(
            torch.from_numpy(slots.astype(np.int64)),
            plan_tensors(
                np.zeros_like(lens),
                lens,
                tables,
                block_size=16,
                group_size=config.num_attention_heads // kv_heads,
                window=window,
            ),
        )
        for window in (None, SLIDING_WINDOW)
    }
    return {
        "input_ids": torch.arange(lens.sum())[None] * 7 % config.vocab_size,
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "use_cache": False,
        "tokenmill": CpuAttentionContext(
            [torch.zeros(size) for _ in layers], [torch.zeros(size) for _ in layers], groups
        ),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_eager_rows(family: str) -> None:
    model = random_model(family_config(family))
    lengths = (5, 70, 33, 1)
    arguments = packed(model, lengths)
    ids = arguments["input_ids"][0].split(lengths)
    expected = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in ids])
    model.set_attn_implementation(ATTENTION_NAME)
    got = model(**arguments).logits[0]
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_fullgraph_compile_takes_the_operator(family: str) -> None:
    model = random_model(family_config(family))
    model.set_attn_implementation(ATTENTION_NAME)
    plain = packed(model, (5, 40, 3))
    expected = model(**plain).logits
    compiled_arguments = packed(model, (5, 40, 3))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = compiled(**compiled_arguments).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(
        compiled_arguments["tokenmill"].keys,
        plain["tokenmill"].keys,
        strict=True,
    ):
        assert mine.any()
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_the_operator_keeps_torchs_rules() -> None:
    """It says what it mutates and what shape it returns: else a compiler reorders or drops it."""
    pages = Pages([(5, 3), (0, 2)], kv_heads=2, group=2)
    plans = plan_tensors(
        pages.starts, pages.lens, pages.tables, block_size=BLOCK_SIZE, group_size=2, window=None
    )
    arguments = (
        pages.query,
        torch.randn(5, 2, HEAD_DIM),
        torch.randn(5, 2, HEAD_DIM),
        pages.keys,
        pages.values,
        torch.tensor([row * BLOCK_SIZE for row in range(5)]),
        plans,
        SCALE,
        None,
        None,
    )
    checks = torch.library.opcheck(paged_attention, arguments, test_utils=("test_schema", "test_faketensor"))
    assert set(checks.values()) == {"SUCCESS"}


def test_without_the_engines_context_it_says_so() -> None:
    model = random_model(family_config("llama"))
    model.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(ValueError, match="needs the engine's context"):
        model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)
