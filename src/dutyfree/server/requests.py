"""Bodies of requests that have no call of their own."""

from __future__ import annotations

import msgspec

from dutyfree.contract import Limits
from dutyfree.wire.recipes import WireRecipe


class CreateRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/sandboxes``; everything has a default."""

    image: str | None = None
    recipe: WireRecipe | None = None
    limits: Limits | None = None
    labels: dict[str, str] = {}
    lease: float = 600.0
    """Seconds after which the sandbox ends, unless it is kept alive."""
    patience: float | None = None
    """Seconds to wait for the sandbox at most; otherwise the answer is an error with status 429."""
