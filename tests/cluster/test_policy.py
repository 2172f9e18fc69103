"""Which unit next: arrays in, a number out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cluster.policy import choose_steal, next_free


def claimed(text: str) -> np.ndarray:
    return np.array([letter == "x" for letter in text], bool)


@pytest.mark.parametrize(
    ("units", "last", "hint", "chosen"),
    [
        ("........", None, None, 0),
        ("........", None, 0.5, 4),
        ("........", None, 1.0, 7),
        ("xx......", 1, None, 2),
        ("x......x", 0, 0.9, 1),
        # somebody is at unit 2: the middle of the longest run
        ("..x......", None, None, 6),
        ("xxx..x...", 2, None, 3),
        ("xxx..x....xx", 11, None, 8),
        ("xxx..x....xx", 4, None, 8),
        ("xxxxx.", 4, None, 5),
        ("xxxxx.", None, None, 5),
        (".xxxx.", 3, None, 0),
        ("xxxxxx", 3, None, None),
        ("", None, None, None),
    ],
)
def test_choices(units, last, hint, chosen):
    assert next_free(claimed(units), last, hint) == chosen


@given(st.lists(st.booleans(), max_size=60), st.none() | st.integers(0, 59), st.none() | st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_only_what_is_free_is_chosen_and_something_if_anything_is(taken, last, hint):
    units = np.array(taken, bool)
    last = None if last is None or last >= len(units) else last
    chosen = next_free(units, last, hint)
    assert (chosen is None) == bool(units.all())
    assert chosen is None or not units[chosen]


def test_many_workers_hardly_ever_want_the_same_unit():
    """Each knows only its own claims and what a collision taught it."""
    num_units, num_workers = 4096, 16
    truth = np.zeros(num_units, bool)
    known = [truth.copy() for _ in range(num_workers)]
    last: list[int | None] = [None] * num_workers
    claims = collisions = 0
    while not truth.all():
        for worker in range(num_workers):
            while (unit := next_free(known[worker], last[worker], worker / num_workers)) is not None:
                if truth[unit]:
                    collisions += 1
                    known[worker] = truth.copy()
                    continue
                truth[unit] = known[worker][unit] = True
                last[worker] = unit
                claims += 1
                break
    assert claims == num_units
    assert collisions < 0.05 * num_units


def test_the_last_unit_of_the_richest_is_stolen():
    assert choose_steal({"a": [1, 2], "b": [7, 8, 9], "c": []}) == 9
    assert choose_steal({"a": [], "b": []}) is None
    assert choose_steal({}) is None
