"""One new token a row arrives behind what the row has; padding rows write nothing and see nothing."""

from __future__ import annotations

import pytest
import torch
from kernels.paged_cases import DEVICE, assert_close, attention, int32, make_cache, random

pytest.importorskip("triton", reason="the kernels need triton")

from pipeline.kernels.paged_append import append_kv  # noqa: E402
from pipeline.models.architecture import Architecture  # noqa: E402
from pipeline.models.transformers_flash import paged_decode_function  # noqa: E402


def test_new_keys_and_values_lie_behind_the_old_ones_and_nowhere_else():
    keys, values = random(5, 2, 16, 64, seed=2), random(5, 2, 16, 64, seed=3)
    expected_keys, expected_values = keys.clone(), values.clone()
    # Its keys and values are slices of a wider tensor. Rows 2 and 3 are padding: no length, no page.
    fused = random(4, 4, 64)
    new_keys, new_values = fused.split(2, 1)
    tables = int32([3, 1, 4, 0, 2, 2, -1, -1]).view(4, 2)
    for row, (page, offset) in enumerate([(1, 1), (4, 15)]):
        expected_keys[page, :, offset], expected_values[page, :, offset] = new_keys[row], new_values[row]
    lengths = int32([9, 9, 9, 9])
    append_kv(new_keys, new_values, keys, values, int32([17, 15, -1, 0]), tables, lengths)
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)
    assert lengths.tolist() == [18, 16, 0, 0]


@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (7, 0.0), (None, 3.0)])
def test_decoding_in_flash_attentions_words(window, softcap):
    lengths = [1, 40, 16]
    cache = make_cache(lengths, num_heads=2, head_dim=32, page_size=16)
    architecture = Architecture(
        num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=9, max_position=64
    )
    decode = paged_decode_function(architecture, max_rows=4, page_size=16, dtype=torch.float32, device=DEVICE)
    query = random(4, 1, 4, 32)
    new = [torch.zeros(4, 1, 2, 32, device=DEVICE) for _ in range(2)]
    flat = [tensor.permute(0, 2, 1, 3) for tensor in (cache.keys, cache.values)]
    # What is appended is what the reference's cache holds already, then erased here.
    for tensor, made in zip(flat, new, strict=True):
        for row, length in enumerate(lengths):
            page, offset = cache.block_tables[row, (length - 1) // 16], (length - 1) % 16
            made[row, 0] = tensor[page, offset]
    expected = torch.cat(
        [
            attention(query[i], cache, i, length - 1, 32**-0.5, window=window, softcap=softcap or None)
            for i, length in enumerate(lengths)
        ]
    )
    for tensor in flat:
        for row, length in enumerate(lengths):
            tensor[cache.block_tables[row, (length - 1) // 16], (length - 1) % 16] = float("nan")
    tables = torch.cat([cache.block_tables, torch.full_like(cache.block_tables[:1], -1)])
    past = int32([length - 1 for length in lengths] + [-1])
    got = decode(
        query,
        *flat,
        *new,
        cache_seqlens=past,
        block_table=tables,
        softmax_scale=32**-0.5,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=softcap,
    )
    assert got.shape == (4, 1, 4, 32)
    assert_close(got[:3, 0], expected)
    assert not got[3].any()
