"""Ranges of units that are finished as one: where a dataset's shards begin anew.

Pure. A range is a function of the input and one setting, never of who made which unit when, so that a range
published while the job runs is cut like one that is compacted at the end.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipeline.input.order import Units


class UnitRange(NamedTuple):
    """Units first to last, inclusive."""

    first: int
    last: int


def unit_ranges(units: Units, samples: int, range_rows: int) -> list[UnitRange]:
    """All units in turn; a range holds those that begin between two multiples of `range_rows` results.

    Files that are added to the input later change the last range at most, and append others.
    """
    starts = units.starts()[:-1]
    if not len(starts):
        return []
    ids = starts * samples // range_rows
    begins = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
    ends = np.append(begins[1:], len(starts)) - 1
    return [UnitRange(*pair) for pair in zip(begins.tolist(), ends.tolist(), strict=True)]
