"""Where dutyfree keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache() -> Path:
    """The cache's root: DUTYFREE_CACHE, else dutyfree under XDG_CACHE_HOME, else under ~/.cache.

    It need not exist yet.
    """
    if own := os.environ.get("DUTYFREE_CACHE"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path there is to be ignored.
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "dutyfree"
