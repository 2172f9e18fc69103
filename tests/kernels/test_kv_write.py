"""New keys and values arrive at their slots, bit for bit, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from kernels.paged_cases import DEVICE, random

pytest.importorskip("triton", reason="the kernels need triton")

from pipeline.kernels.kv_write import write_kv  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_heads", "head_dim", "page_size"), [(2, 64, 16), (3, 96, 48), (1, 128, 64)])
def test_slices_of_a_fused_projection_are_written(dtype, num_heads, head_dim, page_size):
    num_tokens, num_query_heads = 5, 2 * num_heads
    fused = random(num_tokens, num_query_heads + 2 * num_heads, head_dim, dtype=dtype)
    new_keys, new_values = fused[:, num_query_heads:].split(num_heads, 1)
    assert not new_keys.is_contiguous()
    keys, values = (random(4, num_heads, page_size, head_dim, dtype=dtype, seed=s) for s in (2, 3))
    expected_keys, expected_values = keys.clone(), values.clone()
    slots = [0, page_size - 1, page_size, 4 * page_size - 1, 2 * page_size + 7]
    for token, slot in enumerate(slots):
        expected_keys[slot // page_size, :, slot % page_size] = new_keys[token]
        expected_values[slot // page_size, :, slot % page_size] = new_values[token]
    write_kv(new_keys, new_values, keys, values, torch.tensor(slots, device=DEVICE))
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)


def test_padding_tokens_and_empty_batches_write_nothing():
    keys, values = random(2, 2, 16, 64, seed=2), random(2, 2, 16, 64, seed=3)
    expected_keys, expected_values = keys.clone(), values.clone()
    new = random(3, 2, 64)
    write_kv(new, new, keys, values, torch.tensor([-1, 17, -16], device=DEVICE))
    expected_keys[1, :, 1] = expected_values[1, :, 1] = new[1]
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)
    write_kv(new[:0], new[:0], keys, values, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert torch.equal(keys, expected_keys)
