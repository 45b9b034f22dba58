"""Every substrate of ours keeps every promise, or skips by name what it does not offer."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import dutyfree
from dutyfree.conformance import CHECKS, Check
from dutyfree.contract import Substrate

SUBSTRATES = ["scripted", "bare", pytest.param("docker", marks=pytest.mark.docker)]

KNOWN = {
    ("bare", "timeout_kills_the_disguised"): "bare finds processes by a mark in their environment",
    ("bare", "leaving_kills_the_disguised"): "bare finds processes by a mark in their environment",
}
"""Promises that a substrate cannot keep, and why."""

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", params=SUBSTRATES)
async def substrate(request: pytest.FixtureRequest) -> AsyncIterator[Substrate]:
    async with dutyfree.open(request.param) as opened:
        yield opened


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_conformance(request: pytest.FixtureRequest, substrate: Substrate, check: Check) -> None:
    if reason := KNOWN.get((substrate.name, check.name)):
        request.applymarker(pytest.mark.xfail(reason=reason, raises=AssertionError))
    await check(substrate)
