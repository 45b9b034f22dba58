"""The result of one check of the doctor."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. ``needed``: a study on ``bare`` depends on it."""

    what: str
    fine: bool
    detail: str
    remedy: str = ""
    needed: bool = False
