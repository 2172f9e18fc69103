"""How the attention kernels are launched: a small table, no tuning at run time.

A launch is a plain value that every entry point takes, so that a benchmark can sweep it. Tiles of keys and
values wait in shared memory, which is why the width of a head in bytes is the key.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeLaunch:
    """block_n: positions per tile. programs_per_sm: how many programs the splits are made to fill an SM with.
    min_split_tiles: the fewest tiles that are worth a program of their own (outside bitwise)."""

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    min_split_tiles: int = 2


@dataclass(frozen=True)
class PrefillLaunch:
    """block_m: rows per tile, queries x group. block_n: positions per tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By the padded head's bytes. num_stages is no number of buffers: where a tile lies is read from the block
# table first, so the compiler's chain is table, tile, product, and odd numbers count: 3 stages keep one tile
# on its way, 5 keep two, 7 three (read from the intermediate code of Triton 3.6; 4 and 6 are as 3 and 5).
# An H200 needs about 30 KB per SM on its way from memory at any time (4.8 TB/s x 0.8 us / 132 SMs); an entry
# keeps two tiles of 2 x block_n x bytes = 32 KB.
# Measured on an H200, 32 query and 8 KV heads of 128 in bf16, pages of 64 (benchmarks/attention_kernels.py):
# of 55 launches (64, 5 stages, 4 warps, 1 program per SM) is the best or within 0.2 % of it for 32 rows of
# 1,024 to 8,192 and for 192 to 256 short ones: 3.7 to 4.35 TB/s. Cutting rows for 3 programs per SM, which
# fills the SMs' shared memory, loses a sixth: rows that need no second program are read at full speed.
_DECODE = {
    128: DecodeLaunch(block_n=128, num_warps=4, num_stages=5),
    256: DecodeLaunch(block_n=64, num_warps=4, num_stages=5),
    512: DecodeLaunch(block_n=32, num_warps=4, num_stages=5),
    1024: DecodeLaunch(block_n=16, num_warps=4, num_stages=5),
}
# Two buffers each of keys and values, beside the queries. The accumulator of 128 rows x 128 columns needs
# eight warps to stay in registers; twice the width halves the rows.
# Measured on an H200 as above, TFLOP/s: 349 for (128, 64, 8 warps, 5 stages), 342 with 7 stages, 311 with 3;
# 308 for 64 rows; block_n 32 and 128 are slower.
_PREFILL = {
    128: PrefillLaunch(block_m=128, block_n=64, num_warps=8, num_stages=5),
    256: PrefillLaunch(block_m=128, block_n=64, num_warps=8, num_stages=5),
    512: PrefillLaunch(block_m=64, block_n=32, num_warps=4, num_stages=3),
    1024: PrefillLaunch(block_m=32, block_n=16, num_warps=4, num_stages=3),
}


def decode_launch(head_bytes: int, page_size: int, group: int) -> DecodeLaunch:
    """head_bytes: of one head of one position. page_size and group decide nothing until a measurement says
    so: pages below block_n are gathered, and a group is padded to 16 rows either way."""
    return _DECODE[_bucket(head_bytes)]


def prefill_launch(head_bytes: int, page_size: int, group: int) -> PrefillLaunch:
    return _PREFILL[_bucket(head_bytes)]


def _bucket(head_bytes: int) -> int:
    for limit in _DECODE:
        if head_bytes <= limit:
            return limit
    raise ValueError(f"heads of {head_bytes} bytes are wider than the attention kernels take ({limit})")
