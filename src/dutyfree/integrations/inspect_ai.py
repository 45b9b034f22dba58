"""Inspect's sandbox environment ``dutyfree``: every sample in a sandbox, of ``native`` by default.

Inspect finds it by its entry point. A substrate is opened once for all samples that ask for the same, and
closed after the last.
"""

from __future__ import annotations

import asyncio
import errno
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

from inspect_ai.tool import ToolError
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from pydantic import BaseModel, ConfigDict

import dutyfree
from dutyfree import Limits, Recipe, Sandbox, Substrate, recipes
from dutyfree.contract import limited
from dutyfree.contract.errors import ActionError, SubstrateError, UsageError
from dutyfree.recipes import toml

NOT_EXECUTABLE = 126

EXPECTED = (FileNotFoundError, IsADirectoryError, PermissionError)
"""Errors that Inspect reports to the model."""


class DutyfreeSandboxConfig(BaseModel):
    """What ``SandboxEnvironmentSpec("dutyfree", config)`` takes.

    A string instead of it is the image, or a recipe's file if it ends in ``.toml``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    substrate: str = "native"
    options: dict[str, Any] = {}
    """Options of the substrate, as ``dutyfree.open`` takes them."""
    image: str | None = None
    """Short for a recipe with only an image."""
    recipe: dict[str, Any] | str | None = None
    """A TOML file (docs/recipes.md), or what stands in one: {"image": …, "stages": [{"kind": "pip", …}]}."""
    limits: dict[str, Any] = {}
    """The fields of ``dutyfree.Limits``: cpus, memory, pids, disk, network."""
    user: str | None = None
    """The user of commands that do not name another."""

    def __hash__(self) -> int:
        """Inspect uses configs as keys."""
        return hash(self.model_dump_json())

    def wanted(self) -> tuple[Recipe, Limits]:
        """Reads files. Raises ValueError."""
        if self.image is not None and self.recipe is not None:
            raise ValueError(
                "the sandbox's config has both an image and a recipe: put the image into the recipe"
            )
        try:
            recipe = self._recipe()
            limits = {"output": SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE, **self.limits}
            return recipe, limited(limits, Limits())
        except UsageError as error:
            raise ValueError(f"the sandbox's config cannot be used: {error}") from error

    def _recipe(self) -> Recipe:
        """Raises UsageError."""
        if self.recipe is None:
            return Recipe(image=self.image)
        if isinstance(self.recipe, str):
            return recipes.load(self.recipe)
        return toml.recipe(self.recipe, Path.cwd(), "recipe")


class _Opened:
    """An open substrate, and how many tasks and sandboxes use it."""

    def __init__(self) -> None:
        self.holders = 0
        self.lock = asyncio.Lock()
        self.stack = AsyncExitStack()
        self.substrate: Substrate | None = None


_OPENED: dict[tuple[int, str], _Opened] = {}
"""Open substrates by event loop and options."""


def _key(config: DutyfreeSandboxConfig) -> tuple[int, str]:
    return id(asyncio.get_running_loop()), repr((config.substrate, sorted(config.options.items())))


async def _hold(config: DutyfreeSandboxConfig) -> Substrate:
    opened = _OPENED.setdefault(_key(config), _Opened())
    opened.holders += 1
    try:
        async with opened.lock:
            if opened.substrate is None:
                context = dutyfree.open(config.substrate, **config.options)
                opened.substrate = await opened.stack.enter_async_context(context)
        return opened.substrate
    except BaseException:
        await _release(config)
        raise


async def _release(config: DutyfreeSandboxConfig) -> None:
    key = _key(config)
    opened = _OPENED[key]
    opened.holders -= 1
    if not opened.holders:
        del _OPENED[key]
        await opened.stack.aclose()


@sandboxenv(name="dutyfree")
class DutyfreeSandboxEnvironment(SandboxEnvironment):
    """One sandbox, with Inspect's method names and errors."""

    def __init__(self, sandbox: Sandbox, config: DutyfreeSandboxConfig, stack: AsyncExitStack) -> None:
        super().__init__()
        self.sandbox = sandbox
        self._config = config
        self._stack = stack

    # --- Lifecycle ----------------------------------------------------------------------------------

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return DutyfreeSandboxConfig(**config)

    @classmethod
    async def task_init(cls, task_name: str, config: BaseModel | str | None) -> None:
        """Open the substrate and prepare the recipe of all samples. Raises DutyfreeError, ValueError."""
        found = _config(config)
        substrate = await _hold(found)
        try:
            recipe, _ = await asyncio.to_thread(found.wanted)
            await substrate.prepare(recipe)
        except BaseException:
            await _release(found)
            raise

    @classmethod
    async def task_cleanup(cls, task_name: str, config: BaseModel | str | None, cleanup: bool) -> None:
        # Sandboxes end with this process, so none can be kept.
        found = _config(config)
        if _key(found) in _OPENED:
            await _release(found)

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Create one sandbox, "default". Raises DutyfreeError, ValueError."""
        found = _config(config)
        recipe, limits = await asyncio.to_thread(found.wanted)
        async with AsyncExitStack() as stack:
            substrate = await _hold(found)
            stack.push_async_callback(_release, found)
            sandbox = await stack.enter_async_context(substrate.sandbox(recipe, limits=limits))
            return {"default": cls(sandbox, found, stack.pop_all())}
        raise AssertionError("unreachable")

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            await environment.as_type(cls)._stack.aclose()

    # --- Actions ------------------------------------------------------------------------------------

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 (Inspect's name)
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command as Inspect describes it. After a timeout it is not repeated, because it has run."""
        try:
            seen = await self.sandbox.exec(
                cmd,
                stdin=input.encode() if isinstance(input, str) else input,
                cwd=cwd,
                env=env,
                user=user or self._config.user,
                timeout=timeout,
            )
        except (SubstrateError, ActionError) as error:
            _translate(error)
        if not seen.started and user is not None and repr(user).encode() in seen.stderr:
            raise SandboxUserUnsupportedError(seen.stderr.decode(errors="replace").strip())
        if seen.timed_out:
            raise TimeoutError(f"the command was killed after {timeout} seconds: {cmd[0]}")
        stdout, stderr = (data.decode(errors="replace") for data in (seen.stdout, seen.stderr))
        if seen.cut.stdout or seen.cut.stderr:
            raise OutputLimitExceededError(
                limit_str=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR,
                truncated_output=stdout + stderr,
            )
        if seen.exit_code == NOT_EXECUTABLE and "permission denied" in stderr.lower():
            raise PermissionError(errno.EACCES, stderr.strip(), cmd[0])
        return ExecResult(seen.ok, seen.exit_code, stdout, stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        try:
            await self.sandbox.write(file, contents.encode() if isinstance(contents, str) else contents)
        except (SubstrateError, ActionError) as error:
            _translate(error)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit, shown = (
            SandboxEnvironmentLimits.MAX_READ_FILE_SIZE,
            SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR,
        )
        try:
            data = await self.sandbox.read(file)
        except (SubstrateError, ActionError) as error:
            if isinstance(error, ActionError) and error.kind == "too_large":
                raise OutputLimitExceededError(limit_str=shown, truncated_output=None) from error
            _translate(error)
        if len(data) > limit:
            raise OutputLimitExceededError(limit_str=shown, truncated_output=None)
        return data.decode() if text else data

    def default_polling_interval(self) -> float:
        return 0.2


def _config(config: BaseModel | str | None) -> DutyfreeSandboxConfig:
    if config is None:
        return DutyfreeSandboxConfig()
    if isinstance(config, str):
        return DutyfreeSandboxConfig(**{"recipe" if config.endswith(".toml") else "image": config})
    if not isinstance(config, DutyfreeSandboxConfig):
        raise TypeError(f"the sandbox dutyfree takes a DutyfreeSandboxConfig, not {type(config).__name__}")
    return config


def _translate(error: SubstrateError | ActionError) -> NoReturn:
    """Raise the error of Inspect: those of the substrate and those of the agent stay separate.

    What the agent brought about goes to the model: as the Python error that Inspect knows, or as a ToolError.
    """
    if isinstance(error, SubstrateError):
        raise SandboxUnavailableError(str(error)) from error
    if isinstance(error, EXPECTED):
        raise error
    raise ToolError(str(error)) from error
