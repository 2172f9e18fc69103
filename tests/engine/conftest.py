"""References by transformers' own generate, computed once per model and session."""

from __future__ import annotations

import pytest
from fakes import FAMILIES, Case, make_case


@pytest.fixture(scope="session", params=["shipped", *FAMILIES])
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)
