"""Seeds of the simulator: whatever befalls the workers, each row counts once."""

from __future__ import annotations

from collections import Counter

import pytest
from cluster import simulator
from cluster.mutations import HARMLESS, MUTATIONS, first_noticed

from pipeline.cluster.claims import Claims

pytestmark = pytest.mark.faults

NUM_SEEDS = 150
NUM_SEEDS_LARGE = 10_000
# Each of them in so many seeds at the latest, or the simulator has become blind to it.
NOTICED_WITHIN = 1000


def run(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += simulator.run(seed).counts
    return counts


def test_each_row_counts_once_whatever_befalls_the_workers() -> None:
    counts = run(range(NUM_SEEDS))
    kinds = ("kill", "stall", "freeze", "error", "lost reply", "host cut", "power cut", "clock jump", "hang")
    for kind in (*kinds, "leave", "full disk", "takeovers", "void commits"):
        assert any(name.startswith(kind) for name in counts), f"{kind} befell nobody"


def test_a_seed_is_the_same_run_again() -> None:
    assert [simulator.run(seed) for seed in (3, 4)] == [simulator.run(seed) for seed in (3, 4)]


def test_a_failing_seed_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Claims, "finish", lambda claims, ordinal, sample: None)
    with pytest.raises(AssertionError, match=r"seed 5: (?s:.*)python -m cluster\.simulator 5$"):
        simulator.run(5)


@pytest.mark.large
@pytest.mark.slow
def test_ten_thousand_seeds() -> None:
    run(range(NUM_SEEDS, NUM_SEEDS_LARGE))


@pytest.mark.parametrize(
    "name", ["no fsync of a commit's bytes", "no fsync of a journal", "no fsync of a lease"]
)
def test_a_missing_fsync_is_noticed_soon(name: str) -> None:
    assert first_noticed(name, range(10)) is not None


@pytest.mark.large
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_each_precaution_is_needed(name: str) -> None:
    assert first_noticed(name, range(NOTICED_WITHIN)) is not None


@pytest.mark.large
@pytest.mark.slow
@pytest.mark.parametrize("name", HARMLESS)
def test_what_exactly_once_does_not_rest_on_is_not_needed(name: str) -> None:
    assert first_noticed(name, range(NOTICED_WITHIN // 10)) is None
