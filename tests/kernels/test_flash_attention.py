"""FlashAttention-3 over our pages, with a stand-in of its interface in plain torch; and what refuses it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from pipeline.kernels import flash_attention
from pipeline.kernels.flash_attention import flash_prefill, why_not_flash

CPU = torch.device("cpu")
SCALE = 0.3


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    num_splits: int,
) -> torch.Tensor:
    """The package's contract, token by token: pages [N, P, H, D], the mask aligned to the end of the row."""
    assert causal and num_splits == 1 and k_cache.stride(-1) == 1
    assert cache_seqlens.dtype == page_table.dtype == cu_seqlens_q.dtype == torch.int32
    out = torch.full_like(q, torch.nan)
    for row, (begin, end) in enumerate(
        zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)
    ):
        assert end - begin <= max_seqlen_q
        context = int(cache_seqlens[row])
        pages = page_table[row].long()
        keys, values = (t[pages].flatten(0, 1)[:context].float() for t in (k_cache, v_cache))
        for token in range(begin, end):
            position = context - (end - token)
            first = 0 if window_size[0] < 0 else max(0, position - window_size[0])
            seen = slice(first, position + 1)
            for head in range(q.shape[1]):
                kv_head = head // (q.shape[1] // keys.shape[1])
                scores = keys[seen, kv_head] @ q[token, head].float() * softmax_scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                out[token, head] = (scores.softmax(0) @ values[seen, kv_head]).to(q.dtype)
    return out


def install(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    module = ModuleType("fa3_fwd_interface")
    module.flash_attn_with_kvcache = function  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec("fa3_fwd_interface", None)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    flash_attention.flash_package.cache_clear()


@pytest.fixture(autouse=True)
def no_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is installed here is hidden, and what a test found is forgotten."""
    monkeypatch.setattr(flash_attention, "_PACKAGES", ("fa3_fwd_interface",))
    flash_attention.flash_package.cache_clear()
    yield
    flash_attention.flash_package.cache_clear()


def reason(dtype: torch.dtype = torch.bfloat16, head_dim: int = 16, **options: Any) -> str | None:
    return why_not_flash(4, 2, head_dim, 16, dtype, CPU, scale=SCALE, **options)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("pair", [False, True], ids=["tensor", "tuple"])
def test_a_build_that_is_right_is_taken(
    monkeypatch: pytest.MonkeyPatch, window: int | None, softcap: float | None, pair: bool
) -> None:
    install(monkeypatch, lambda *a, **k: (attend(*a, **k), None) if pair else attend(*a, **k))
    assert reason(window=window, softcap=softcap) is None


def test_chunks_between_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens before the first chunk are decoding rows': the chunks' own come out where they lie."""
    install(monkeypatch, attend)
    torch.manual_seed(0)
    query = torch.randn(7, 2, 8)
    keys, values = torch.randn(2, 3, 1, 16, 8).unbind(0)
    tables = torch.tensor([[2, 1], [1, 0]], dtype=torch.int32)
    lens = torch.tensor([20, 2], dtype=torch.int32)
    out = flash_prefill(
        query, keys, values, tables, torch.tensor([2, 5, 7], dtype=torch.int32), lens, scale=SCALE
    )
    assert out[:2].isnan().all() and not out[2:].isnan().any()
    context = torch.cat([keys[2, 0], keys[1, 0]])[:19], torch.cat([values[2, 0], values[1, 0]])[:19]
    weights = (context[0] @ query[3, 1] * SCALE).softmax(0)
    torch.testing.assert_close(out[3, 1], weights @ context[1])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        # What a build may do with pages, masks and options that it does not know.
        (lambda k: k.update(window_size=(-1, -1)), "off float64"),
        (lambda k: k.update(softcap=0.0), "off float64"),
        (lambda k: k.update(page_table=k["page_table"].flip(1)), "off float64"),
        (lambda k: k.update(cache_seqlens=k["cache_seqlens"] - 1), "off float64"),
    ],
    ids=["window", "softcap", "pages", "mask"],
)
def test_a_build_that_is_wrong_is_refused(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[dict[str, Any]], None], said: str
) -> None:
    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        spoil(options)
        return attend(*args, **options)

    install(monkeypatch, wrong)
    assert said in str(reason(window=6, softcap=2.0))


def test_a_build_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("This flash attention build does not support paged KV.\nmore")

    install(monkeypatch, refuse)
    assert reason() == "This flash attention build does not support paged KV."


def test_what_it_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip install fa3-fwd" in str(reason())

    def never(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("called")

    install(monkeypatch, never)
    assert "not in torch.float32" in str(reason(torch.float32))
    assert "heads of 264" in str(reason(head_dim=264))
    assert "heads of 20" in str(reason(head_dim=20))
