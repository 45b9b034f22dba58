"""Network policies: how entries are parsed and encoded."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.contract import Limits
from dutyfree.engine.launcher import network_policy, protocol
from dutyfree.engine.launcher.protocol import NetworkFlag, RuleKind

HEAD = protocol.NETWORK.size + protocol.RESOLVERS_MAX * protocol.RESOLVER.size


def rules(*entries: str) -> list[tuple[int, int, int, bytes, bytes]]:
    body = network_policy.encode(entries, ())
    found, at = [], HEAD
    while at < len(body):
        address, port, kind, prefix, size = protocol.RULE.unpack_from(body, at)
        at += protocol.RULE.size
        found.append((kind, port, prefix, address, body[at : at + size]))
        at += size
    return found


def mapped(text: str) -> bytes:
    return bytes(10) + b"\xff\xff" + ipaddress.ip_address(text).packed


NONE = bytes(16)


@pytest.mark.parametrize(
    ("entry", "rule"),
    [
        ("host", (RuleKind.HOST, 0, 0, NONE, b"")),
        ("host:9418", (RuleKind.HOST, 9418, 0, NONE, b"")),
        ("example.org", (RuleKind.NAME, 0, 0, NONE, b"example.org")),
        ("Example.ORG.:443", (RuleKind.NAME, 443, 0, NONE, b"example.org")),
        ("*.example.org", (RuleKind.SUBDOMAINS, 0, 0, NONE, b"example.org")),
        ("*", (RuleKind.SUBDOMAINS, 0, 0, NONE, b"")),
        ("*:80", (RuleKind.SUBDOMAINS, 80, 0, NONE, b"")),
        ("münchen.example", (RuleKind.NAME, 0, 0, NONE, b"xn--mnchen-3ya.example")),
        ("10.0.0.0/8", (RuleKind.ADDRESS, 0, 104, mapped("10.0.0.0"), b"")),
        ("192.0.2.7:22", (RuleKind.ADDRESS, 22, 128, mapped("192.0.2.7"), b"")),
        ("10.0.0.0/8:22", (RuleKind.ADDRESS, 22, 104, mapped("10.0.0.0"), b"")),
        ("2001:db8::/32", (RuleKind.ADDRESS, 0, 32, ipaddress.ip_address("2001:db8::").packed, b"")),
        ("[2001:db8::1]:443", (RuleKind.ADDRESS, 443, 128, ipaddress.ip_address("2001:db8::1").packed, b"")),
        ("[2001:db8::]/32:443", (RuleKind.ADDRESS, 443, 32, ipaddress.ip_address("2001:db8::").packed, b"")),
        ("0.0.0.0/0", (RuleKind.ADDRESS, 0, 96, mapped("0.0.0.0"), b"")),
        ("::/0", (RuleKind.ADDRESS, 0, 0, NONE, b"")),
    ],
)
def test_entries(entry: str, rule: tuple[int, int, int, bytes, bytes]) -> None:
    assert rules(entry) == [rule]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("", "not the name"),
        ("example.org:", "no port ''"),
        ("example.org:0", "no port '0'"),
        ("example.org:70000", "no port '70000'"),
        ("https://example.org", "is a URL where a host is wanted: write 'example.org'"),
        ("https://me@example.org:8443/a", "a URL where a host is wanted: write 'example.org:8443'"),
        ("file:///etc", "a URL where a host is wanted"),
        ("http://[", "a URL where a host is wanted"),
        ("example.org/path", "example.org/path"),
        ("*example.org", "not the name"),
        ("a.*.org", "not the name"),
        ("-bad.example", "not the name"),
        ("two words", "not the name"),
        ("1.2.3", "1.2.3"),
        ("10.1.2.3/8", "host bits"),
        ("1.2.3.4/40", "1.2.3.4/40"),
        ("127.0.0.1", "never in reach"),
        ("127.0.0.0/8:80", "never in reach"),
        ("169.254.169.254", "never in reach"),
        ("::1", "never in reach"),
        ("[::1]:80", "never in reach"),
        ("fe80::/64", "never in reach"),
        ("fd00:ec2::254", "never in reach"),
        ("100.100.100.200", "never in reach"),
        ("::ffff:127.0.0.1", "never in reach|IPv4"),
        ("x" * 64 + ".org", "not the name"),
    ],
)
def test_nonsense(entry: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        network_policy.encode((entry,), ())
    assert repr(entry) in str(raised.value)


def test_whole_policies() -> None:
    assert network_policy.encode(None, ()) == network_policy.encode("off", ()) == b""
    flags, count, resolvers = protocol.NETWORK.unpack_from(
        network_policy.encode("on", network_policy.parse_resolvers(["192.0.2.1"]))
    )
    assert (flags, count, resolvers) == (NetworkFlag.ALL, 0, 1)
    with pytest.raises(ValueError, match='write "off"'):
        network_policy.encode((), ())
    with pytest.raises(ValueError, match="a list of what is allowed"):
        network_policy.encode("example.org", ())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="are too many"):
        network_policy.encode(("example.org",) * 257, ())


@given(st.lists(st.text(max_size=40), min_size=1, max_size=3).map(tuple))
def test_any_text_is_taken_or_told(entries: tuple[str, ...]) -> None:
    try:
        body = network_policy.encode(entries, ())
    except ValueError:
        pass
    else:
        assert len(rules(*entries)) == len(entries)
        assert len(body) <= protocol.REQUEST_MAX


def test_limits_are_read_from_toml() -> None:
    for text, wanted in (('"on"', "on"), ('"off"', "off"), ('["example.org:443"]', ("example.org:443",))):
        assert msgspec.toml.decode(f"network = {text}", type=Limits).network == wanted
    with pytest.raises(msgspec.ValidationError):
        msgspec.toml.decode('network = "open"', type=Limits)


def test_resolvers(tmp_path: Path) -> None:
    assert network_policy.parse_resolvers(
        ["192.0.2.1", "192.0.2.1:5353", "2001:db8::1", "[2001:db8::1]:54"]
    ) == (
        network_policy.Resolver(ipaddress.ip_address("192.0.2.1")),
        network_policy.Resolver(ipaddress.ip_address("192.0.2.1"), 5353),
        network_policy.Resolver(ipaddress.ip_address("2001:db8::1")),
        network_policy.Resolver(ipaddress.ip_address("2001:db8::1"), 54),
    )
    with pytest.raises(ValueError, match="nowhere"):
        network_policy.parse_resolvers(["nowhere"])
    settings = tmp_path / "resolv.conf"
    settings.write_text(
        "# c\nnameserver 192.0.2.1\nnameserver what\nnameserver fe80::1%eth0\nsearch a.example b\n"
    )
    found = network_policy.host_resolvers(settings)
    assert [str(server.address) for server in found] == ["192.0.2.1", "fe80::1"]
    assert network_policy.resolver_settings(settings).endswith(b"options edns0\nsearch a.example b\n")
    assert network_policy.host_resolvers(tmp_path / "none") == ()
