"""Ranges of user ids: no two owners on this host have the same one."""

from __future__ import annotations

import pytest

from dutyfree.substrates.local import id_ranges

pytestmark = pytest.mark.root("only root can write to /run")


def test_ranges_of_ids_are_not_shared() -> None:
    one, other = id_ranges.IdRanges(), id_ranges.IdRanges()
    try:
        taken = {one.claim() for _ in range(50)} | {other.claim() for _ in range(50)}
        assert len(taken) == 100
        assert all(first >= id_ranges.FIRST and first % id_ranges.COUNT == 0 for first in taken)
    finally:
        one.close()
        other.close()
