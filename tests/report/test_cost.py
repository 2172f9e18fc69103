from __future__ import annotations

import pytest

from pipeline.report.cost import dollars, dollars_per_million, is_over_budget, money, projected


def test_an_hour_on_eight_gpus_costs_eight_gpu_hours():
    assert dollars(3600, 5.0, num_gpus=8) == pytest.approx(40.0)
    assert dollars(90, 4.0) == pytest.approx(0.10)


def test_dollars_per_million_tokens():
    # 14,000 tokens a second at $5 an hour: 50.4 M tokens for $5.
    assert dollars_per_million(dollars(3600, 5.0), 14_000 * 3600) == pytest.approx(0.0992, abs=1e-4)
    assert dollars_per_million(1.0, 0) is None


def test_projection_is_in_proportion_to_rows():
    assert projected(2.0, done=50, total=200) == pytest.approx(8.0)
    assert projected(2.0, done=0, total=200) is None


@pytest.mark.parametrize(("spent", "limit", "over"), [(1, None, False), (1, 2, False), (2, 2, True)])
def test_budget(spent, limit, over):
    assert is_over_budget(spent, limit) is over


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0, "$0.00"),
        (1234.5, "$1,234.50"),
        (0.5, "$0.50"),
        (0.0992, "$0.099"),
        (0.01, "$0.010"),
        (0.000123, "$0.00012"),
    ],
)
def test_money(usd, text):
    assert money(usd) == text
