from __future__ import annotations

import pytest

from dutyfree import paths
from dutyfree.workloads.fixture import Fixture, build


@pytest.fixture(scope="session")
def fixture() -> Fixture:
    """The real one, kept between runs."""
    return build(paths.cache())
