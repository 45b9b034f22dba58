from __future__ import annotations

import pytest

from dutyfree import paths
from dutyfree.workloads.downloads import FixtureError
from dutyfree.workloads.fixture import Fixture, build
from dutyfree.workloads.project import NETWORKX


@pytest.fixture(scope="session")
def networkx() -> Fixture:
    try:
        return build(paths.cache(), project=NETWORKX)
    except FixtureError as error:
        pytest.skip(f"no networkx: {error}")


@pytest.fixture(scope="session")
def fixture() -> Fixture:
    """The real one, kept between runs."""
    return build(paths.cache())
