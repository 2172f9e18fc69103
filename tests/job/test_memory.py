"""A job's memory does not grow with its rows. `benchmarks/memory_flat.py` shows it for 200,000."""

from __future__ import annotations

import pytest

import pipeline
from benchmarks.memory_flat import growth, measure

pytestmark = pytest.mark.slow


def test_memory_is_flat(tmp_path):
    samples = measure(tmp_path, 20_000)
    assert len({sample.rows for sample in samples}) >= 5, samples
    # a kilobyte a row would be 15 MB
    assert growth(samples, after=5_000) < 15, samples
    assert pipeline.open_parts(tmp_path / "job").num_rows == 20_000
