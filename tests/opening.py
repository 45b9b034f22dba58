"""Substrates with all that their sandboxes can do, for tests of one substrate."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import dutyfree


def open_native(**options: Any) -> AbstractAsyncContextManager[Any]:
    return dutyfree.open("native", **options)
