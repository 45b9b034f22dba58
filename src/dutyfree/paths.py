"""Where dutyfree keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path

from dutyfree.contract.errors import UsageError


def cache() -> Path:
    """The cache's root: DUTYFREE_CACHE, else dutyfree under XDG_CACHE_HOME, else under ~/.cache.

    It need not exist yet. Raises UsageError for a user without a home directory.
    """
    try:
        if own := os.environ.get("DUTYFREE_CACHE"):
            return Path(own).expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification: a relative path there is to be ignored.
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    except RuntimeError as error:  # as of a container's user who has no name
        raise UsageError(
            f"there is no place for the cache, the user {os.getuid()} has no home directory",
            remedy="set DUTYFREE_CACHE to a directory",
        ) from error
    return root / "dutyfree"
