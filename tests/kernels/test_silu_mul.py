"""silu(gate) * up is eager's, over the whole range of its types."""

from __future__ import annotations

import pytest
import torch
from kernels.paged_cases import DEVICE, random
from torch.nn.functional import silu

pytest.importorskip("triton", reason="the kernels need triton")

from pipeline.kernels.silu_mul import silu_mul  # noqa: E402

# Roundings to the type: two of half a unit, and in the interpreter two of a whole one in bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 100, 2100])
def test_equals_eager(dtype, width):
    gate_up = 4 * random(3, 2 * width, dtype=dtype)
    gate, up = gate_up.split(width, 1)
    out = silu_mul(gate_up)
    assert out.is_contiguous()
    torch.testing.assert_close(out, silu(gate) * up, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 100)


def test_rounds_between_the_activation_and_the_product_as_eager_does():
    gate_up = 4 * random(32, 512, dtype=torch.float16)
    gate, up = gate_up.split(256, 1)
    out = silu_mul(gate_up)
    assert (out != silu(gate) * up).float().mean().item() < 2e-3
    assert (out != (silu(gate.float()) * up.float()).half()).float().mean().item() > 0.1


def test_the_ends_of_the_range_give_no_nan():
    gate = torch.tensor([-3e38, -200.0, -89.0, -0.0, 0.0, 89.0, 3e38], device=DEVICE)
    out = silu_mul(torch.cat([gate, torch.ones_like(gate)])[None])[0]
    torch.testing.assert_close(out, silu(gate))


@pytest.mark.parametrize("block", [16, 64, 1024])
def test_a_row_depends_on_neither_its_neighbours_nor_the_block_and_may_be_a_slice(block):
    wide = random(4, 300)
    gate_up = wide[:, 100:]
    out = silu_mul(gate_up, block=block)
    for row in range(4):
        assert torch.equal(silu_mul(gate_up[row : row + 1])[0], out[row])
    assert silu_mul(gate_up[:0]).shape == (0, 100)
