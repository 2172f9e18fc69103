"""Which unit next. Pure: arrays and numbers in, a number out.

Workers that run on beside each other read the input in its order, each from a place of its own; they meet
only when the list is nearly used up, and so hardly ever want the same unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def next_free(claimed: np.ndarray, last: int | None, hint: float | None) -> int | None:
    """A unit that nobody has claimed; None if there is none.

    claimed bool [units]. last: the unit this worker claimed before. hint: where in the list to begin, 0 to 1,
    while nothing is claimed at all.
    """
    if last is not None and last + 1 < len(claimed) and not claimed[last + 1]:
        return last + 1
    free = np.flatnonzero(~claimed)
    if not len(free):
        return None
    if len(free) == len(claimed):
        return min(int((hint or 0.0) * len(claimed)), len(claimed) - 1)
    # runs of neighbours: each begins where the step to the one before is not 1
    begins = np.flatnonzero(np.diff(free, prepend=free[0] - 2) != 1)
    lengths = np.diff(begins, append=len(free))
    longest = int(np.argmax(lengths))
    # the owner of the unit before a run will come along from its beginning
    return int(free[begins[longest] + lengths[longest] // 2])


def choose_steal(unstarted: Mapping[str, Sequence[int]]) -> int | None:
    """Which unit to take from the living. unstarted: units that each worker holds and has not begun, in turn.

    The one that would come last with the worker that has most of them; None if there is none.
    """
    richest = max(unstarted, key=lambda worker: (len(unstarted[worker]), worker), default=None)
    return unstarted[richest][-1] if richest is not None and unstarted[richest] else None
