"""Network policies: parse the list of allowed hosts, and encode it for the launcher.

An allow-list names hosts (``example.org``), all names below a domain (``*.example.org``; ``*`` for every
name), addresses (``10.1.2.3``, ``10.0.0.0/8``, ``2001:db8::/32``) and ``host``, which stands for this
machine's own loopback. Each may have a port: ``example.org:443``, ``[2001:db8::1]:443``.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from dutyfree.contract import NetworkPolicy
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import NetworkFlag, RuleKind

RESOLVER = "169.254.1.1"
"""Address of the DNS server that a sandbox sees in its own network."""
HOST = "169.254.1.2"
"""Address of this machine's loopback in a sandbox's network."""

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_DENYLIST = (Path(__file__).parents[1] / "init/egress/denylist.h").read_text("utf-8")
DENIED = tuple(ipaddress.ip_network(text) for text in re.findall(r'DENIED\("(.+?)"', _DENYLIST))
"""The networks that no sandbox reaches, read from the C program's list."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Resolver(NamedTuple):
    """A DNS server that this host uses."""

    address: Address
    port: int = 53


def encode(policy: NetworkPolicy | None, resolvers: Sequence[Resolver]) -> bytes:
    """The body of a Request.NETWORK; empty if the network is off. Raises ValueError with the reason."""
    if policy is None or policy == "off":
        return b""
    if isinstance(policy, str) and policy != "on":
        raise ValueError(f'the network is "off", "on", or a list of what is allowed, not {policy!r}')
    if not policy:
        raise ValueError('an empty list allows nothing: write "off"')
    rules = b"" if policy == "on" else b"".join(_rule(entry) for entry in policy)
    count = 0 if policy == "on" else len(policy)
    used = resolvers[: protocol.RESOLVERS_MAX]
    head = protocol.NETWORK.pack(NetworkFlag.ALL if policy == "on" else 0, count, len(used))
    packed = b"".join(protocol.RESOLVER.pack(_mapped(server.address), server.port) for server in used)
    body = head + packed.ljust(protocol.RESOLVERS_MAX * protocol.RESOLVER.size, b"\0") + rules
    if count > protocol.RULES_MAX or len(body) > protocol.REQUEST_MAX - protocol.REQUEST.size:
        raise ValueError(f"{count} entries are too many: at most {protocol.RULES_MAX} are allowed")
    return body


def _rule(entry: str) -> bytes:
    if not isinstance(entry, str):
        raise ValueError(f"{entry!r} is not a host, domain or address")
    refuse_url(entry)
    text, port = _split(entry)
    if text == "host":
        return protocol.RULE.pack(bytes(16), port, RuleKind.HOST, 0, 0)
    if text == "*":
        return protocol.RULE.pack(bytes(16), port, RuleKind.SUBDOMAINS, 0, 0)
    try:
        network = ipaddress.ip_network(text)
    except ValueError as error:
        if re.search(r"[:/]", text):
            raise ValueError(f"{entry!r}: {error}") from error
    else:
        return _address(entry, network, port)
    encoded = _name(entry, text.removeprefix("*."))
    kind = RuleKind.SUBDOMAINS if text.startswith("*.") else RuleKind.NAME
    return protocol.RULE.pack(bytes(16), port, kind, 0, len(encoded)) + encoded


def refuse_url(host: str) -> None:
    """Raises ValueError if ``host`` is a URL."""
    if "://" in host:
        try:
            name = urlsplit(host).netloc.rpartition("@")[2] or "example.org"
        except ValueError:
            name = "example.org"
        raise ValueError(f"{host!r} is a URL where a host is wanted: write {name!r}")


def _split(entry: str) -> tuple[str, int]:
    """Split an entry into host and port; 0 is no port. Raises ValueError."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](/\d+)?(?::(.*))?", entry)
    text, port = entry, None
    if bracketed:
        text, port = bracketed[1] + (bracketed[2] or ""), bracketed[3]
    elif entry.count(":") == 1:
        text, _, port = entry.partition(":")
    if port is None:
        return text, 0
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"{entry!r}: there is no port {port!r}")
    return text, int(port)


def _address(entry: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network, port: int) -> bytes:
    first = network.network_address
    if isinstance(first, ipaddress.IPv6Address) and first.ipv4_mapped:
        raise ValueError(f"{entry!r}: write it as an IPv4 address")
    if isinstance(first, ipaddress.IPv6Address) and first.scope_id:
        raise ValueError(f"{entry!r}: an address with a zone is link-local, and those are never in reach")
    if any(network.version == one.version and network.subnet_of(one) for one in DENIED):  # type: ignore[arg-type]
        raise ValueError(f"{entry!r} is never in reach of a sandbox (this machine's loopback is `host`)")
    bits = network.prefixlen + (96 if network.version == 4 else 0)
    return protocol.RULE.pack(_mapped(first), port, RuleKind.ADDRESS, bits, 0)


def _mapped(address: Address) -> bytes:
    return address.packed if address.version == 6 else bytes(10) + b"\xff\xff" + address.packed


def _name(entry: str, name: str) -> bytes:
    name = name.removesuffix(".").lower()
    try:
        encoded = name.encode("ascii") if name.isascii() else name.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{entry!r} is not the name of a host or domain: {error}") from error
    labels = encoded.decode().split(".")
    if len(encoded) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or labels[-1].isdigit():
        raise ValueError(f"{entry!r} is not the name of a host or domain")
    return encoded


def parse_resolvers(texts: Sequence[str]) -> tuple[Resolver, ...]:
    """Parse DNS servers, each ``address`` or ``address:port``. Raises ValueError."""
    split = [_split(text) for text in texts]
    return tuple(Resolver(ipaddress.ip_address(address), port or 53) for address, port in split)


def host_resolvers(path: Path = Path("/etc/resolv.conf")) -> tuple[Resolver, ...]:
    """The DNS servers of this machine; lines that cannot be parsed are skipped."""
    try:
        words = [line.split() for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        return ()
    found = []
    for word in words:
        if len(word) > 1 and word[0] == "nameserver":
            try:
                found.append(Resolver(ipaddress.ip_address(word[1].split("%")[0])))
            except ValueError:
                continue
    return tuple(found[: protocol.RESOLVERS_MAX])


def resolver_settings(path: Path = Path("/etc/resolv.conf")) -> bytes:
    """``/etc/resolv.conf`` for sandboxes: our DNS server, and the search domains of this machine."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    if os.geteuid() != 0:  # without root, a sandbox shares the host's network
        return "\n".join([*lines, ""]).encode()
    search = [line for line in lines if line.split()[:1] in (["search"], ["domain"])]
    return "\n".join([f"nameserver {RESOLVER}", "options edns0", *search[-1:], ""]).encode()
