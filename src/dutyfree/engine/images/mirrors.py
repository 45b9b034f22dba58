"""Mirrors of registries, and registries without TLS, from the configuration and the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images.pull import PullOptions
from dutyfree.engine.images.reference import HUB


def pull_options(
    mirrors: Mapping[str, tuple[str, ...]] | None = None, insecure: tuple[str, ...] = ()
) -> PullOptions:
    """Add DUTYFREE_MIRRORS and DUTYFREE_INSECURE_REGISTRIES to the configured ones. Raises CreateError.

    ``DUTYFREE_MIRRORS="ghcr.io=https://one.example,https://two.example"``: a mirror without a registry in
    front is one of Docker Hub.
    """
    merged = {registry: tuple(addresses) for registry, addresses in (mirrors or {}).items()}
    for entry in _words("DUTYFREE_MIRRORS"):
        registry, equals, address = entry.partition("=")
        if not equals:
            registry, address = HUB, entry
        merged[registry] = (*merged.get(registry, ()), address)
    for address in (address for addresses in merged.values() for address in addresses):
        if "://" in address and not address.startswith(("https://", "http://")):
            raise CreateError(
                f"the mirror {address!r} is not a URL", remedy="write it as https://host[:port]"
            )
    return PullOptions(merged, (*insecure, *_words("DUTYFREE_INSECURE_REGISTRIES")))


def _words(variable: str) -> list[str]:
    return [word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()]
