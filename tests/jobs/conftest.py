"""The scripts of jobs/ with commands that only note what they are asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs.fake_slurm import FakeSlurm


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path)
