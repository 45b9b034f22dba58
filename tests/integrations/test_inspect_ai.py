"""Inspect's own checks of a sandbox, all of them, on native; and what they do not look at."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

pytest.importorskip("inspect_ai", reason="to enable it: make test-integrations")

from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.self_check import *  # noqa: F403
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

from dutyfree.integrations.inspect_ai import (
    _OPENED,
    DutyfreeSandboxConfig,
    DutyfreeSandboxEnvironment,
    SandboxUnavailableError,
)

pytestmark = [pytest.mark.anyio, pytest.mark.native]

ROOT = "root of the sandbox may read and write every file in it, whatever its mode"
IMPOSSIBLE = {
    "test_read_file_not_allowed": ROOT,
    "test_write_text_file_without_permissions": ROOT,
    "test_write_binary_file_without_permissions": ROOT,
}
CONFIG = DutyfreeSandboxConfig(limits={"memory": 1 << 30})


@pytest.fixture(scope="module")
async def environment() -> AsyncIterator[SandboxEnvironment]:
    made = await DutyfreeSandboxEnvironment.sample_init("task", CONFIG, {})
    yield made["default"]
    await DutyfreeSandboxEnvironment.sample_cleanup("task", CONFIG, made, False)
    assert not _OPENED


@pytest.fixture
async def sandbox_env(
    environment: SandboxEnvironment, request: pytest.FixtureRequest
) -> SandboxEnvironment:
    if reason := IMPOSSIBLE.get(request.node.originalname):
        request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    return environment


def test_no_check_is_left_out() -> None:
    assert len(self_check.__all__) == 44
    assert set(IMPOSSIBLE) < set(self_check.__all__)
