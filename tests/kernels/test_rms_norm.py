"""The norm, with and without a residual, is transformers' own, and a row's is its own affair."""

from __future__ import annotations

import pytest
import torch
from kernels.paged_cases import DEVICE, random
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("triton", reason="the kernels need triton")

from pipeline.kernels.rms_norm import add_rms_norm  # noqa: E402

EPS = 1e-5
# One unit in the last place of values up to 8; the interpreter rounds bfloat16 towards zero, each time.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-8, torch.bfloat16: 2**-4}


def eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = LlamaRMSNorm(len(weight), EPS).to(x.device, x.dtype)
    norm.weight.data = weight
    with torch.no_grad():
        return norm(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 100, 1536])
def test_equals_eager(dtype, width):
    x, residual = random(3, width, dtype=dtype), 30 * random(3, width, dtype=dtype, seed=2)
    weight = random(width, dtype=dtype, seed=3)
    normed, new_residual = add_rms_norm(x, residual, weight, EPS)
    exact = DEVICE.type == "cuda" or dtype != torch.bfloat16
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 2**-7, "atol": 0}
    torch.testing.assert_close(new_residual, x + residual, **tolerance)
    torch.testing.assert_close(normed, eager(new_residual, weight), rtol=0, atol=TOLERANCE[dtype])
    alone, same = add_rms_norm(x, None, weight, EPS)
    assert same is x
    torch.testing.assert_close(alone, eager(x, weight), rtol=0, atol=TOLERANCE[dtype])


def test_rounds_before_the_weight_as_eager_does():
    width = 256
    x, weight = random(64, width, dtype=torch.float16), 30 * random(width, dtype=torch.float16, seed=3)
    normed, _ = add_rms_norm(x, None, weight, EPS)
    wide = x.float()
    rounded_once = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS) * weight.float()).half()
    differing = (normed != eager(x, weight)).float().mean().item()
    assert differing < 2e-3
    assert (normed != rounded_once).float().mean().item() > 0.1


def test_the_norm_is_taken_of_the_rounded_sum():
    x, residual = random(32, 256, dtype=torch.float16), 30 * random(32, 256, dtype=torch.float16, seed=2)
    weight = torch.ones(256, dtype=torch.float16, device=DEVICE)
    normed, _ = add_rms_norm(x, residual, weight, EPS)
    exact = x.float() + residual.float()
    of_the_exact_sum = (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + EPS)).half()
    assert (normed != eager(x + residual, weight)).float().mean().item() < 2e-3
    assert (normed != of_the_exact_sum).float().mean().item() > 0.1


def test_eps_keeps_a_row_of_zeros_finite():
    zeros = torch.zeros(2, 64, device=DEVICE)
    normed, _ = add_rms_norm(zeros, zeros, torch.ones(64, device=DEVICE), EPS)
    assert torch.equal(normed, zeros)
    small = torch.full((1, 64), 1e-3, device=DEVICE)
    normed, _ = add_rms_norm(small, None, torch.ones(64, device=DEVICE), EPS)
    torch.testing.assert_close(normed, torch.full_like(small, 1e-3 / (1e-6 + EPS) ** 0.5))


def test_a_row_does_not_depend_on_its_neighbours_and_may_be_a_slice():
    wide, residual = random(5, 192), random(5, 192, seed=2)
    weight = random(96, seed=3)
    x, residual = wide[:, 96:], residual[:, :96]
    normed, new_residual = add_rms_norm(x, residual, weight, EPS)
    assert normed.is_contiguous() and new_residual.is_contiguous()
    for row in range(5):
        alone = add_rms_norm(x[row : row + 1], residual[row : row + 1], weight, EPS)
        assert torch.equal(alone[0][0], normed[row]) and torch.equal(alone[1][0], new_residual[row])
    empty, _ = add_rms_norm(x[:0], residual[:0], weight, EPS)
    assert empty.shape == (0, 96)
