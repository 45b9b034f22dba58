"""What a tenant may ask of the engine: the engine itself trusts its caller, and would do all of it.

The tenant ``local`` is whoever may connect without a token: users of this machine, who reach its loopback
anyway. So they may open it to a sandbox too, if they say so: by ``"on"`` in a call of ours, or by the entry
``host``. What a sandbox gets from the server, unasked, never has it (``without_host``): code in it would use
a server without tokens as its user does. The rules about registries are for the other tenants.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

import msgspec

from dutyfree.contract import Limits, NetworkPolicy
from dutyfree.contract.errors import CreateError, LimitError, RecipeError, UsageError
from dutyfree.engine.images import reference
from dutyfree.engine.launcher.isolation import Isolation

LOCAL = "local"
"""The tenant of callers without a token, which only the loopback and a Unix socket let in."""

NETWORK_WITHOUT_HOST: NetworkPolicy = ("*", "0.0.0.0/0", "::/0")
"""Everything that this machine reaches, except its own loopback."""

LARGEST_OUTPUT = 64 << 20
"""Bytes of each stream of a command that the server keeps."""
LARGEST_LABELS = 16 << 10
"""Bytes of all labels of a sandbox."""
LONGEST_KEY = 256
"""Characters of an idempotency key."""

_HOST_SCHEMES = re.compile(r"(?:oci|docker-daemon|docker-archive|dir|file):")
"""Images that are files or services of the server's host."""


def check_image(tenant: str, image: str, *, known_registries: tuple[str, ...]) -> None:
    """Raises RecipeError for what is no image, a file of this host, or of a registry in its own network.

    ``known_registries`` are those that the operator has named.
    """
    if image.startswith(("/", ".", "~")) or _HOST_SCHEMES.match(image):
        raise RecipeError(
            f"{image[:80]!r} would be a file of the server's host", remedy="name an image of a registry"
        )
    if image == "host":
        return
    try:
        registry = reference.parse(image).registry
    except CreateError as error:
        raise RecipeError(error.message, remedy=error.remedy) from error
    if tenant == LOCAL:
        return
    if registry not in known_registries and _is_internal(registry):
        raise RecipeError(
            f"the registry {registry[:80]!r} is inside of the server's network",
            remedy="use a public registry, or ask the operator to name this one: --option insecure=…",
        )


def _is_internal(registry: str) -> bool:
    host = registry.rpartition(":")[0] if re.search(r":\d+$", registry) else registry
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_global
    except ValueError:
        # A name of one label is one of the local network. 127.1 and 0x7f.1 are addresses, too.
        return (
            "." not in host
            or host.lower().endswith((".localhost", ".local", ".internal"))
            or _is_number(host)
        )


def _is_number(host: str) -> bool:
    return re.fullmatch(r"(?:0x[0-9a-f]*|\d+)", host.lower().rpartition(".")[2]) is not None


def allowed_limits(tenant: str, limits: Limits | None, *, networked: bool) -> Limits | None:
    """The limits of a sandbox for this tenant. Raises LimitError."""
    if limits is None:
        return None
    if limits.output > LARGEST_OUTPUT:
        raise LimitError(f"output must be ≤ {LARGEST_OUTPUT} on a server, not {limits.output}")
    network = None if limits.network is None else allowed_network(tenant, limits.network, networked=networked)
    return limits if network == limits.network else msgspec.structs.replace(limits, network=network)


def allowed_network(tenant: str, policy: NetworkPolicy, *, networked: bool) -> NetworkPolicy:
    """The network policy for this tenant: nothing lets it reach the host's loopback. Raises LimitError.

    ``networked``: whether sandboxes have networks of their own on this host.
    """
    if tenant == LOCAL or policy == "off":
        return policy
    if not networked:
        raise LimitError(
            "sandboxes of this server have no network of their own, so tenants get none",
            remedy='use network="off", or ask the operator to run the server as root',
        )
    if policy == "on":
        return NETWORK_WITHOUT_HOST
    for entry in policy:
        if entry.partition(":")[0] == "host":
            raise LimitError(
                f"{entry!r}: the loopback of the server's host is not for tenants", remedy="leave it out"
            )
    return policy


def without_host(isolation: Isolation, *, networked: bool) -> NetworkPolicy:
    """The network of stages, and of sandboxes whose client leaves it open. It has no loopback of the host.

    ``networked``: whether sandboxes have networks of their own. If not, only all or nothing can be enforced.
    """
    if isolation.shares_network:  # whatever the policy says
        return "on"
    return NETWORK_WITHOUT_HOST if networked else "off"


def check_labels(labels: Mapping[str, str]) -> None:
    """Raises UsageError."""
    size = sum(len(name) + len(value) for name, value in labels.items())
    if size > LARGEST_LABELS:
        raise UsageError(f"the labels have {size} characters, and may have {LARGEST_LABELS}")


def check_key(key: str) -> None:
    """Raises UsageError."""
    if len(key) > LONGEST_KEY:
        raise UsageError(f"an idempotency key of {len(key)} characters: it may have {LONGEST_KEY}")
