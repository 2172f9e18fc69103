"""Which kernel each layer group gets: what was asked for, what the kernels take, and what is said of it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import random_model
from models.families import WINDOW, family

if importlib.util.find_spec("triton") is None:
    pytest.skip("the kernels need triton", allow_module_level=True)
_triton = sys.modules.get("triton")
if not torch.cuda.is_available() and not (_triton and _triton.knobs.runtime.interpret):
    importlib.import_module("kernels.conftest")

from pipeline.config import AttentionKernel, Determinism, EngineConfig  # noqa: E402
from pipeline.models import attention_kernel  # noqa: E402
from pipeline.models.attention_kernel import choose_prompt_kernels  # noqa: E402
from pipeline.models.cuda_attention import PromptKernel  # noqa: E402
from pipeline.models.load import LoadedModel, wrap_model  # noqa: E402

FLASH = PromptKernel.flash_attention_3
NO_WINDOW = "This flash attention build does not support local attention."


def load(name: str) -> LoadedModel:
    return wrap_model(random_model(family(name).config()))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int | None, float | None]]:
    """A build without windows. The list gets what was asked of it: windows and softcaps."""
    calls: list[tuple[int | None, float | None]] = []

    def why_not(*_: Any, scale: float, window: int | None, softcap: float | None) -> str | None:
        calls.append((window, softcap))
        return None if window is None else NO_WINDOW

    monkeypatch.setattr(attention_kernel, "why_not_flash", why_not)
    monkeypatch.setattr(attention_kernel, "flash_package", lambda: SimpleNamespace(__name__="a_package"))
    return calls


def test_each_group_gets_what_takes_it(asked: list[Any]) -> None:
    choice = choose_prompt_kernels(load("Gemma 2"), AttentionKernel.auto, 16)
    assert dict(choice.kernels) == {None: FLASH}
    assert choice.words == f"flash_attention_3 of a_package, triton (not flash_attention_3: {NO_WINDOW})"
    # The softcap is the layers' own, and two layers of a kind are asked about once.
    assert sorted(asked, key=str) == [(WINDOW, 3.0), (None, 3.0)]


def test_sinks_are_our_own_kernels(asked: list[Any]) -> None:
    choice = choose_prompt_kernels(load("GPT-OSS"), AttentionKernel.auto, 16)
    assert dict(choice.kernels) == {} and "sinks" in choice.words and asked == []


def test_demanded(asked: list[Any]) -> None:
    choice = choose_prompt_kernels(load("Llama"), AttentionKernel.flash_attention_3, 16)
    assert dict(choice.kernels) == {None: FLASH} and choice.words == "flash_attention_3 of a_package"
    with pytest.raises(ValueError, match=r"attention_kernel=flash_attention_3 .*local.*block_size=128"):
        choose_prompt_kernels(load("Gemma 2"), AttentionKernel.flash_attention_3, 16)


def test_never_asked(asked: list[Any]) -> None:
    for wanted, bitwise in ((AttentionKernel.triton, False), (AttentionKernel.auto, True)):
        choice = choose_prompt_kernels(load("Llama"), wanted, 16, bitwise)
        assert dict(choice.kernels) == {} and choice.words.startswith("triton")
    assert asked == []


@pytest.mark.parametrize(
    "settings", [{"attention_kernel": AttentionKernel.flash_attention_3}, {"compile": True}]
)
def test_bitwise_takes_neither(settings: dict[str, Any]) -> None:
    (key,) = settings
    with pytest.raises(ValueError, match=rf"engine\.{key}=.*engine\.determinism=fast"):
        EngineConfig(determinism=Determinism.bitwise, **settings)
