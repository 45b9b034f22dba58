"""Every substrate of ours keeps every promise, or skips by name what it does not offer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator

import anyio
import pytest

import dutyfree
from dutyfree.conformance import CHECKS, Check, judge
from dutyfree.contract import Substrate

SUBSTRATES = [
    "scripted",
    "bare",
    pytest.param("native", marks=pytest.mark.native),
    pytest.param("native-cold", marks=pytest.mark.native),
    pytest.param("native-warm", marks=pytest.mark.native),
    pytest.param("docker", marks=pytest.mark.docker),
]


@pytest.fixture(scope="module", params=SUBSTRATES)
async def substrate(request: pytest.FixtureRequest) -> AsyncIterator[Substrate]:
    async with dutyfree.open(request.param) as opened:
        await opened.prepare()  # an image may have to be made, which is no part of any check
        yield opened


@pytest.mark.anyio
@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_conformance(substrate: Substrate, check: Check) -> None:
    await check(substrate)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dutyfree.conformance", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_line() -> None:
    done = run("scripted", "-k", "files and not round_trips or abilities.fork")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[-1].endswith("skipped")
    assert "0 failed" in lines[-1]
    assert any(line.startswith("passed") and line.endswith("fork") for line in lines)
    assert any("files_are_the_commands_files  the substrate runs no real commands" in line for line in lines)
    assert "round_trips" not in done.stdout


def test_failures_are_told_with_their_reason() -> None:
    done = run("scripted", "-k", "write_makes_parents", "--option", "fail_phase=dispatch", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["failed"], found["substrate"]) == (1, "scripted")
    assert "DispatchError: dispatch failed by script" in found["results"][0]["reason"]


def test_the_list_names_every_check() -> None:
    lines = run("--list").stdout.splitlines()
    assert [line.split()[1] for line in lines] == [check.name for check in CHECKS]
    assert all(check.promise for check in CHECKS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "unknown substrate 'nowhere'"),
        (("scripted", "--option", "seed=x"), "Expected `int`"),
        (("scripted", "--option", "seed"), "is not NAME=VALUE"),
        (("scripted", "-k", "nothing_like_it"), "no check matches"),
        ((), "name a substrate"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.anyio
async def test_a_check_that_does_not_end_fails(scripted: Substrate) -> None:
    stuck = Check("stuck", "", "none", lambda _: anyio.sleep_forever(), 0.01)
    result = await judge(scripted, stuck)
    assert (result.outcome, result.reason) == ("failed", "did not end within 0.01 s")
