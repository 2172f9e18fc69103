"""What the tests of whole jobs share: one server of commands for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real_jobs import CommandServer


@pytest.fixture(scope="session")
def commands() -> Iterator[CommandServer]:
    with CommandServer() as server:
        yield server
