"""Inspect's own checks of a sandbox, all of them, on native; and what they do not look at."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("inspect_ai", reason="to enable it: make test-integrations")

from inspect_ai.tool import ToolError
from inspect_ai.util import OutputLimitExceededError, SandboxEnvironment
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from dutyfree.contract.errors import CreateError
from dutyfree.integrations.inspect_ai import _OPENED, DutyfreeSandboxConfig, DutyfreeSandboxEnvironment
from tests.processes import ran

pytestmark = pytest.mark.native

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
async def sandbox_env(environment: SandboxEnvironment, request: pytest.FixtureRequest) -> SandboxEnvironment:
    if reason := IMPOSSIBLE.get(request.node.originalname):
        request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    return environment


def test_no_check_is_left_out() -> None:
    assert len(self_check.__all__) == 44
    assert set(IMPOSSIBLE) < set(self_check.__all__)


async def test_inspect_finds_it_by_its_entry_point() -> None:
    assert registry_find_sandboxenv("dutyfree").__name__ == "DutyfreeSandboxEnvironment"


async def test_samples_share_the_substrate_and_nothing_else() -> None:
    provider = DutyfreeSandboxEnvironment
    before = {key: opened.holders for key, opened in _OPENED.items()}
    await provider.task_init("task", CONFIG)
    one = await provider.sample_init("task", CONFIG, {})
    two = await provider.sample_init("task", CONFIG, {})
    assert len(_OPENED) == 1
    await one["default"].write_file("/tmp/secret", "of one")
    with pytest.raises(FileNotFoundError, match="/tmp/secret"):
        await two["default"].read_file("/tmp/secret")
    await provider.sample_cleanup("task", CONFIG, one, False)
    assert (await two["default"].exec(["true"])).success
    await provider.sample_cleanup("task", CONFIG, two, True)
    await provider.task_cleanup("task", CONFIG, True)
    assert {key: opened.holders for key, opened in _OPENED.items()} == before


async def test_too_much_output_is_told(sandbox_env: SandboxEnvironment) -> None:
    with pytest.raises(OutputLimitExceededError, match="10 MiB"):
        await sandbox_env.exec(["head", "-c", "11000000", "/dev/zero"])


async def test_a_broken_sandbox_is_no_result() -> None:
    made = await DutyfreeSandboxEnvironment.sample_init("task", CONFIG, {})
    await DutyfreeSandboxEnvironment.sample_cleanup("task", CONFIG, made, False)
    with pytest.raises(SandboxUnavailableError, match="closed"):
        await made["default"].exec(["true"])
    with pytest.raises(SandboxUnavailableError, match="closed"):
        await made["default"].read_file("file")


async def test_the_config_reaches_the_sandbox() -> None:
    config = DutyfreeSandboxEnvironment.config_deserialize(
        {
            "recipe": {
                "stages": [{"kind": "setup", "commands": ["echo prepared > state"]}],
                "env": {"GIVEN": "by the recipe"},
                "path": ["bin"],
            },
            "limits": {"pids": 50},
            "user": "nobody",
        }
    )
    made = await DutyfreeSandboxEnvironment.sample_init("task", config, {})
    try:
        assert await made["default"].read_file("state") == "prepared\n"
        assert (await made["default"].exec(["id", "-un"])).stdout == "nobody\n"
        assert (await made["default"].exec(["printenv", "GIVEN"])).stdout == "by the recipe\n"
        assert (await made["default"].exec(["printenv", "PATH"])).stdout.startswith("/workspace/bin:/")
        assert (await made["default"].exec(["id", "-un"], user="root")).stdout == "root\n"
    finally:
        await DutyfreeSandboxEnvironment.sample_cleanup("task", config, made, False)


async def test_a_recipe_from_a_file(tmp_path: Path) -> None:
    """By a config that names it, or by its name alone."""
    (tmp_path / "data").write_text("given")
    file = tmp_path / "recipe.toml"
    file.write_text('[[stages]]\nkind = "files"\nfiles = { there = "data" }')
    for config in (str(file), DutyfreeSandboxConfig(recipe=str(file))):
        await DutyfreeSandboxEnvironment.task_init("task", config)
        made = await DutyfreeSandboxEnvironment.sample_init("task", config, {})
        try:
            assert await made["default"].read_file("there") == "given"
        finally:
            await DutyfreeSandboxEnvironment.sample_cleanup("task", config, made, False)
            await DutyfreeSandboxEnvironment.task_cleanup("task", config, True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DutyfreeSandboxConfig(image="a", recipe={}), "both an image and a recipe"),
        (DutyfreeSandboxConfig(limits={"memory": "much"}), "cannot be used"),
        (DutyfreeSandboxConfig(recipe={"nonsense": 1}), "there is no key 'nonsense'"),
        (
            DutyfreeSandboxConfig(recipe={"stages": [{"kind": "pip"}]}),
            "stage 1 of 1: pip has nothing to install",
        ),
        (DutyfreeSandboxConfig(recipe="/nowhere.toml"), "/nowhere.toml cannot be read"),
    ],
)
async def test_a_wrong_config_is_told(config: DutyfreeSandboxConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await DutyfreeSandboxEnvironment.sample_init("task", config, {})
    assert not [opened for opened in _OPENED.values() if opened.holders < 1]


async def test_a_failed_creation_releases_the_substrate() -> None:
    before = {key: opened.holders for key, opened in _OPENED.items()}
    with pytest.raises(CreateError, match="/no/such/image"):
        await DutyfreeSandboxEnvironment.sample_init("task", "/no/such/image", {})
    assert {key: opened.holders for key, opened in _OPENED.items()} == before


def test_the_page_runs(tmp_path: Path) -> None:
    """The example of docs/integrations.md, as one program."""
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    (tmp_path / "example.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    done = ran([sys.executable, "example.py"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_imported_by_nobody_else() -> None:
    program = "import dutyfree, sys; sys.exit('inspect_ai' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_what_an_agent_brings_about_is_told_to_the_model() -> None:
    """A full disk or a link to itself is no broken sandbox: the sample goes on."""
    config = DutyfreeSandboxConfig(limits={"disk": 16 << 20})
    made = await DutyfreeSandboxEnvironment.sample_init("task", config, {})
    try:
        await made["default"].exec(["sh", "-c", "ln -s loop loop; cat /dev/zero > full"])
        with pytest.raises(ToolError, match="No space left"):
            await made["default"].write_file("large", b"x" * (1 << 20))
        with pytest.raises(ToolError, match="symbolic links"):
            await made["default"].read_file("loop")
        with pytest.raises(FileNotFoundError):
            await made["default"].read_file("missing")
    finally:
        await DutyfreeSandboxEnvironment.sample_cleanup("task", config, made, False)
