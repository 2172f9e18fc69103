"""Keeps freed memory with the process on a CPU, instead of giving it back after every step.

A step allocates and frees the same few megabytes over and over; glibc returns them to the system
each time, and each time the system has to map and clear them anew. Measured on 2 cores, shipped
model, 64 rows: 4,800 tokens/s without, 6,800 with it.
"""

from __future__ import annotations

import ctypes

# Of <malloc.h>. Blocks below the first are taken from the heap, and the heap keeps the second at its top.
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD = -3, 32 * 2**20
_M_TRIM_THRESHOLD, _TRIM_THRESHOLD = -1, 2**31 - 1


def keep_freed_memory() -> None:
    """Tell glibc's allocator; on another C library nothing happens. Holds for the whole process."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
