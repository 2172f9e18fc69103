"""Row keys as numbers, and the one rule of which stored row counts.

Pure numpy. Legend: R = stored rows, in the order in which they were committed.
"""

from __future__ import annotations

import numpy as np

_ROW_BITS = 40


def row_codes(files: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """files int [R], rows int [R] -> int64 [R], one number per row key, ordered like the keys."""
    codes = files.astype(np.int64) << _ROW_BITS
    codes |= rows.astype(np.int64)
    return codes


def last_of_each(slots: np.ndarray) -> np.ndarray:
    """slots int [R], what each stored row is the result of -> bool [R], which of them count.

    A row that was generated again after an error voids the earlier one: the last committed counts.
    Resume, readers, `verify` and `finalize` all ask here.
    """
    current = np.zeros(len(slots), bool)
    # np.unique finds the first of each; seen from the end that is the last
    _, first = np.unique(slots[::-1], return_index=True)
    current[len(slots) - 1 - first] = True
    return current


def ranges_of(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Ascending int [R] -> half-open ranges that cover exactly them."""
    if not len(numbers):
        return []
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = numbers[np.concatenate(([0], breaks))]
    stops = numbers[np.concatenate((breaks, [len(numbers)])) - 1] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
