"""Names, options, third parties' substrates, and what an import costs."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

import dutyfree
from dutyfree import substrates
from dutyfree.contract import Limits
from dutyfree.contract.errors import OptionError
from dutyfree.engine.pool.scheduler.values import Policy

THIRD_PARTY = """
from dutyfree.substrates.scripted import Scripted

class Theirs(Scripted):
    summary = "somebody else's"
"""


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """An installed package with entry points, as pip leaves it."""

    def install(entry_points):
        info = tmp_path / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dutyfree.substrates]\n{entry_points}\n")
        (tmp_path / "theirs_package.py").write_text(THIRD_PARTY)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "theirs_package", raising=False)

    return install


def test_ours_are_known():
    assert substrates.names()[:2] == ("bare", "native")
    assert substrates.names()[8:18] == (
        "docker",
        "oci",
        "vm",
        "kubernetes",
        "ssh",
        "cloud",
        "hosted",
        "e2b",
        "daytona",
        "scripted",
    )


def test_an_unknown_name():
    with pytest.raises(
        OptionError, match=r"unknown substrate 'dokcer' \(did you mean 'docker'\? known are: bare, native"
    ):
        dutyfree.open("dokcer")


def test_an_unknown_option():
    with pytest.raises(
        OptionError,
        match=r"'scripted' has no option 'sed' \(did you mean 'seed'\? its options are: create_seconds",
    ):
        dutyfree.open("scripted", sed=1)


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ({"create_seconds": "long"}, "create_seconds must be a number, not 'long'"),
        ({"fail_phase": "lunch"}, "fail_phase must be one of 'cleanup', .*'ready', not 'lunch'"),
        ({"fail_every": 1.5}, "fail_every must be a whole number, not 1.5"),
    ],
)
def test_a_wrong_type(option, complaint):
    with pytest.raises(OptionError, match=complaint):
        dutyfree.open("scripted", **option)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"peers": "tcp://node-1:7400"}, 'peers must be a list, such as ["tcp://node-1:7400"], not'),
        ({"budget": {"sandbox": 4}}, "in [budget] there is no key 'sandbox' (did you mean 'sandboxes'? the"),
        ({"limits": {"memroy": "2G"}}, "in [limits] there is no key 'memroy' (did you mean 'memory'? the"),
        (
            {"limits": {"memory": "much"}},
            "[limits] memory must be a number of bytes or a size such as '512M', not",
        ),
        (
            {"limits": {"memory": 1.5}},
            "[limits] memory must be a number of bytes or a size such as '512M', not 1.5",
        ),
        ({"limits": "2G"}, "limits must be a table, such as {cpus = …, memory = …}, not '2G'"),
        (
            {"limits": {"network": ["https://a.b"]}},
            "'https://a.b' is a URL where a host is wanted: write 'a.b'",
        ),
        ({"limits": {"network": "of"}}, "[limits] network must be 'off' or 'on' or a list, such as"),
        ({"limits": {"network": ["a", 1]}}, "[limits] network: item 2 of 2 must be a string, not 1"),
        ({"insecure": ["http://a:5000"]}, "insecure: 'http://a:5000' is a URL where a host is wanted"),
        ({"mirrors": {"https://a": []}}, "mirrors: 'https://a' is a URL where a host is wanted"),
        ({"patience": "long"}, "patience must be a number ≥ 0, not 'long'"),
    ],
)
def test_what_an_option_is_made_of_is_told(option, told):
    with pytest.raises(OptionError) as raised:
        dutyfree.open("native", **option)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("native", {"ready": -1}),
        ("native", {"ready": 1 << 40}),
        ("native", {"kept": -1}),
        ("native", {"patience": -1}),
        ("native-cold", {"ready": -1}),
        ("native-warm", {"stock": -1}),
    ],
)
def test_a_number_that_cannot_be(name, option):
    with pytest.raises(OptionError, match=f"{next(iter(option))} must be a .*number ≥ 0.*, not "):
        dutyfree.open(name, **option)


@pytest.mark.parametrize(
    "option",
    [
        {"budget": {"sandboxes": 0}},
        {"budget": {"memory": -1}},
        {"policy": {"half_life": 0}},
        {"policy": {"starting": 0}},
        {"policy": {"backoff": float("nan")}},
        {"policy": {"idle_seconds": -1}},
    ],
)
def test_a_pool_that_cannot_be(option):
    (numbers,) = option.values()
    with pytest.raises(OptionError, match=f"{next(iter(numbers))} must be at least"):
        dutyfree.open("native", **option)


async def test_a_third_partys_substrate(distribution):
    distribution("theirs = theirs_package:Theirs")
    assert substrates.names()[-1] == "theirs"
    assert "theirs_package" not in sys.modules
    assert (await substrates.probe("theirs")).available
    async with dutyfree.open("theirs", exit_code=5) as substrate, substrate.sandbox() as sandbox:
        assert (await sandbox.exec("anything")).exit_code == 5


def test_a_third_party_cannot_take_our_names(distribution):
    distribution("bare = theirs_package:Theirs")
    assert substrates.names().count("bare") == 1
    assert substrates.provider("bare").__module__ == "dutyfree.substrates.bare.substrate"


@pytest.mark.parametrize("value", ["theirs_package:Missing", "no_such_module:Theirs"])
def test_a_third_partys_substrate_that_cannot_be_loaded(distribution, value):
    distribution(f"theirs = {value}")
    with pytest.raises(OptionError, match="'theirs' cannot be loaded from"):
        dutyfree.open("theirs")


@pytest.mark.parametrize("name", substrates.BUILT_IN)
async def test_a_probe_raises_nothing_and_says_how_to_enable(name):
    found = await substrates.probe(name)
    assert found.detail
    assert found.available or found.remedy


def test_importing_is_light():
    heavy = ["anyio", "asyncio", "numpy", "scipy", "matplotlib", "httpx", "rich", "dutyfree.substrates.bare"]
    program = f"import sys, dutyfree; dutyfree.open; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_a_table_says_in_what_it_differs_from_the_default():
    def config(**options):
        return substrates.configure("native", options)[1]

    usual = config()
    assert usual.policy.idle_seconds == 600
    table = config(budget={"disk": 5}, policy={"cover": 9}, limits={"pids": 7})
    assert table.budget == msgspec.structs.replace(usual.budget, disk=5)
    assert table.policy == msgspec.structs.replace(usual.policy, cover=9)
    assert table.limits == Limits(pids=7)
    assert config(policy=Policy()).policy == Policy(), "what is whole is taken so"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (3, "the name of a substrate must be a str, not 3"),
        (None, "the name of a substrate must be a str, not None"),
        (":x", "unknown substrate ':x'"),
        ("json:", "unknown substrate 'json:'"),
        ("json:Nope", "module 'json' has no attribute 'Nope'$"),
        ("json:loads", "json:loads is not a substrate: it has no Config"),
    ],
)
def test_names_that_name_nothing(name, complaint):
    with pytest.raises(OptionError, match=complaint):
        dutyfree.open(name)


@pytest.mark.parametrize("path", [".module:Class", "..:Class"])
def test_relative_import_paths_are_told_in_words(path):
    with pytest.raises(OptionError, match="cannot be loaded"):
        dutyfree.open(path)
