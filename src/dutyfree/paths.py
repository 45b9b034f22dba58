"""Where dutyfree keeps files: those that it can make again, and those that it cannot."""

from __future__ import annotations

import os
from pathlib import Path

from dutyfree.contract.errors import UsageError


def cache() -> Path:
    """The root of the cache: DUTYFREE_CACHE, or ``dutyfree`` in XDG_CACHE_HOME, or in ~/.cache.

    It may not exist yet. Raises UsageError for a user without a home directory.
    """
    try:
        if own := os.environ.get("DUTYFREE_CACHE"):
            return Path(own).expanduser().absolute()
        base = os.environ.get("XDG_CACHE_HOME", "")
        # The XDG specification says to ignore a relative path.
        root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    except RuntimeError as error:  # such as a user of a container without a name
        raise UsageError(
            f"no directory for the cache: the user {os.getuid()} has no home directory",
            remedy="set DUTYFREE_CACHE to a directory",
        ) from error
    return root / "dutyfree"


def state() -> Path:
    """Where a server keeps its tokens: /var/lib/dutyfree for root, otherwise in the home directory.

    It may not exist yet. Raises UsageError for a user without a home directory.
    """
    if os.geteuid() == 0:
        return Path("/var/lib/dutyfree")
    try:
        base = os.environ.get("XDG_STATE_HOME", "")
        return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "dutyfree"
    except RuntimeError as error:
        raise UsageError("this user has no home directory", remedy="name a directory with --state") from error
