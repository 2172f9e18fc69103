"""A Slurm cluster for the tests that need one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.slurm_cluster import SlurmCluster, missing_daemons


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    missing = missing_daemons()
    if missing:
        reason = f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge"
        # For a machine that is to run these tests: without this their absence would go unnoticed.
        if os.environ.get("TOKENMILL_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    # Not below pytest's folder, which is private: munge wants its socket where everybody can reach it.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, SlurmCluster(Path(folder)) as cluster:
        yield cluster
