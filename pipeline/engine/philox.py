"""Counter-based random numbers: the draw of a token is a function of who asks, not of when.

Philox4x32-10 as published by Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC 2011); the tests hold it to the known answers of the authors' Random123 library.
Knows words and counters; refuses to know tokens. Pure numpy.

Shapes: R = rows. Words are uint32.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_ROUNDS = 10


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Four random words per row: counter [R, 4], key [R, 2] -> words [R, 4], all uint32."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[:, i].astype(np.uint64) for i in range(2))
    for _ in range(_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT32) ^ c1 ^ k0,
            product1 & _LOW32,
            (product0 >> _SHIFT32) ^ c3 ^ k1,
            product0 & _LOW32,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW32, (k1 + _WEYL[1]) & _LOW32
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def sequence_key(seed: int, file: int, row: int, sample: int) -> np.ndarray:
    """The two key words [2] of one sequence: Philox of (row, file, sample) under the job's seed.

    Two levels, because seed, row key, sample and position together are wider than one counter.
    seed: any integer, taken modulo 2**64. row: below 2**64; file, sample: below 2**32.
    """
    counter = np.array([[row & 0xFFFFFFFF, row >> 32, file, sample]], np.uint64)
    key = np.array([[seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]], np.uint64)
    return philox4x32(counter, key)[0, :2]


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1) per row: keys [R, 2] uint32, positions [R] -> float64 [R].

    The first two words give 53 bits: (w0 << 21 | w1 >> 11) / 2**53. positions counts the tokens
    of the completion, so a draw does not depend on the batch, the chunk or the machine.
    """
    counter = np.zeros((len(positions), 4), np.uint32)
    counter[:, 0] = positions
    words = philox4x32(counter, keys).astype(np.uint64)
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
