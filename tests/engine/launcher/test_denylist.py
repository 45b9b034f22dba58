"""The denylist: the C program and Python agree on the addresses that no sandbox reaches."""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
from pathlib import Path

import pytest

from dutyfree.engine.launcher import network_policy
from tests.processes import ran

HERE = Path(__file__).parent
SOURCES = Path(network_policy.__file__).parents[1] / "init"

METADATA = {
    "169.254.169.254": "AWS, Google, Azure, IBM, Oracle, DigitalOcean, Hetzner, Vultr, OpenStack, Huawei, …",
    "169.254.170.2": "AWS, for containers",
    "169.254.170.23": "AWS, for pods",
    "169.254.169.252": "Google, on nodes of Kubernetes",
    "169.254.42.42": "Scaleway",
    "169.254.0.23": "Tencent",
    "100.100.100.200": "Alibaba",
    "168.63.129.16": "Azure's wire server",
    "192.0.0.192": "Oracle, at customers",
    "fd00:ec2::254": "AWS",
    "fd00:ec2::23": "AWS, for pods",
    "fd20:ce::254": "Google",
    "fd00:42::42": "Scaleway",
    "fd00:c1::a9fe:a9fe": "Oracle",
    "fd00:100::100:200": "Alibaba",
    "fd00:a9fe:a9fe::1": "Akamai",
    "fe80::a9fe:a9fe": "OpenStack, Akamai, Hetzner",
}
LOCAL = "127.0.0.1 0.0.0.0 224.0.0.1 255.255.255.255 198.18.0.1 :: ::1 ff02::1 fec0::1"
OTHERS = LOCAL.split()
ADDRESSES = """
    8.8.8.8 10.1.2.3 192.168.1.1 100.100.100.201 168.63.129.17 192.0.0.9 198.18.0.2 223.255.255.255
    169.253.1.1 2001:4860:4860::8888 fd00:42::43 fd00::1 fd12:3456::1 fe00::1
"""
REACHED = ADDRESSES.split()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("gcc is missing; to enable it: apt-get install gcc")
    target = tmp_path_factory.mktemp("verdicts") / "verdicts"
    sources = [HERE / "verdicts.c", SOURCES / "egress/policy.c"]
    flags = ["-std=gnu17", "-D_GNU_SOURCE", "-Wall", "-Werror", f"-I{SOURCES}"]
    subprocess.run(["gcc", *flags, *sources, "-o", target], check=True)
    return target


def judged(program: Path, addresses: list[str]) -> dict[str, str]:
    said = ran([program], input="\n".join([*addresses, ""]), check=True)
    return dict(zip(addresses, said.stdout.split(), strict=True))


def forms(text: str) -> list[str]:
    """IPv6 addresses that contain an IPv4 address."""
    a, b, c, d = packed = ipaddress.IPv4Address(text).packed
    inverted = bytes(byte ^ 0xFF for byte in packed)
    local = bytes.fromhex("0064ff9b0001")
    made = [
        bytes(10) + b"\xff\xff" + packed,
        bytes.fromhex("0064ff9b") + bytes(8) + packed,  # NAT64
        local + bytes(6) + packed,  # NAT64 with a local prefix of 96, 64, 56 or 48 bits
        local + bytes(3) + packed + bytes(3),
        local + bytes([7, a, 0, b, c, d]) + bytes(4),
        local + bytes([a, b, 0, c, d]) + bytes(5),
        local + bytes(3) + packed + b"\1\2\3",
        b"\x20\x02" + packed + bytes(9) + b"\1",  # 6to4
        bytes.fromhex("20010000")
        + packed
        + bytes.fromhex("80001234")
        + b"\xf7\xf7\xf7\xf7",  # Teredo's server
        bytes.fromhex("20010000")
        + bytes([65, 54, 227, 120])
        + bytes.fromhex("80001234")
        + inverted,  # its client
        bytes.fromhex("20010db800000000" + "00005efe") + packed,  # ISATAP
        bytes.fromhex("20010db800000000" + "02005efe") + packed,
    ]
    return [str(ipaddress.IPv6Address(one)) for one in made]


def test_metadata_and_what_is_no_destination(program: Path) -> None:
    assert judged(program, [*METADATA, *OTHERS]) == dict.fromkeys([*METADATA, *OTHERS], "refused")
    assert judged(program, list(REACHED)) == dict.fromkeys(REACHED, "allowed")


@pytest.mark.parametrize("text", [text for text in [*METADATA, *OTHERS] if ":" not in text])
def test_inside_of_addresses_of_ipv6(program: Path, text: str) -> None:
    tried = forms(text)
    if text.startswith("0."):  # no translator routes to it
        tried = [tried[0], tried[1], tried[7]]
    assert judged(program, tried) == dict.fromkeys(tried, "refused")


@pytest.mark.parametrize("text", ["8.8.8.8", "10.1.2.3", "93.184.215.14"])
def test_what_may_be_reached_may_be_so_inside(program: Path, text: str) -> None:
    tried = forms(text)
    assert judged(program, tried) == dict.fromkeys(tried, "allowed")


def test_one_list_for_both(program: Path) -> None:
    """Both refuse the first and last address of each network, and Python has all networks."""
    networks = network_policy.DENIED
    assert len(networks) == (SOURCES / "egress/denylist.h").read_text().count("\nDENIED(") > 15
    ends = [str(end) for network in networks for end in (network[0], network[-1])]
    assert judged(program, ends) == dict.fromkeys(ends, "refused")
    for network in networks:
        with pytest.raises(ValueError, match="never in reach"):
            network_policy.encode((str(network),), ())


@pytest.mark.parametrize("entry", ["2001:db8::1%eth0", "fe80::1%1", "[fd00::1%eth0]:443"])
def test_zones(entry: str) -> None:
    with pytest.raises(ValueError, match="never in reach"):
        network_policy.encode((entry,), ())
