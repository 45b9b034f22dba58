from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. ``needed`` says whether the study on ``bare`` depends on it."""

    what: str
    fine: bool
    detail: str
    remedy: str = ""
    needed: bool = False
