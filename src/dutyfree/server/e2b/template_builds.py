"""Builds of E2B templates: each runs as a task of the server, a step at a time, and keeps its log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import msgspec

from dutyfree.contract import Limits, Recipe
from dutyfree.contract.errors import DutyfreeError, LimitError, RecipeError, StageError
from dutyfree.server.e2b import template_steps
from dutyfree.server.e2b.template_steps import TemplateState, TemplateStep
from dutyfree.server.e2b.template_store import Build, BuildLog, Failure, Template, TemplateStore
from dutyfree.substrates.native import Native
from dutyfree.wire.recipes import WireRecipe

AT_ONCE = 2
"""Builds of one tenant that run at the same time. Others wait."""
MOST_STARTED = 100
"""Builds of one tenant that run or wait."""
MOST_STEPS = 500
"""Steps of a build."""
LINES = 1000
"""Lines of a log."""
SHOWN = 2000
"""Characters of a line."""
LOG_SIZE = 256 << 10
"""Characters of a log."""
LARGEST_STATE = 4 << 20
"""Bytes of the recipe to which a build leads. Each of its stages has the variables in it."""
LARGEST_VALUE = 128 << 10
"""Bytes of what a value of ENV expands to: the most that a variable may have."""

BASE = ("base", "default", "")
"""Templates that stand for the server's usual image."""

_log = logging.getLogger(__name__)


class BuildStart(msgspec.Struct, frozen=True, rename="camel"):
    """What the SDK sends to start a build."""

    from_image: str | None = None
    from_template: str | None = None
    from_image_registry: dict[str, Any] | None = None
    force: bool = False
    steps: tuple[TemplateStep, ...] = ()
    start_cmd: str | None = None
    ready_cmd: str | None = None


class Builds:
    """The builds that run. They end with the server."""

    def __init__(
        self,
        store: TemplateStore,
        native: Native,
        recipe: Callable[[str, WireRecipe], Awaitable[Recipe]],
    ) -> None:
        """``recipe`` checks what a tenant may use."""
        self.store = store
        self._native = native
        self._recipe = recipe
        self._running: set[asyncio.Task[None]] = set()
        self._started: Counter[str] = Counter()
        self._room: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))

    def base(self, tenant: str, name: str) -> TemplateState:
        """The state of a template that is ready. Raises RecipeError."""
        if name.partition(":")[0] in BASE:
            return template_steps.begin(None)
        found = self.store.ready(tenant, name)
        if found is None or found[1].state is None:
            raise RecipeError(
                f"template {name[:80]!r} not found", remedy="build it first, or use 'base' or a snapshot"
            )
        return found[1].state

    def state(self, tenant: str, started: str) -> TemplateState:
        """How commands run in a sandbox that started with ``TEMPLATE@BUILD``.

        A sandbox without a template was not created by an E2B client: its image says how commands run.
        """
        name, _, wanted = started.partition("@")
        for template in self.store.of(tenant) if wanted else ():
            build = template.builds.get(wanted)
            if build is not None and build.state is not None:
                return build.state
        return template_steps.begin(None) if name else TemplateState()

    def start(self, template: Template, build: Build, wanted: BuildStart) -> None:
        """Raises RecipeError if the build has begun already, and LimitError for too many builds or steps."""
        if build.status != "waiting" or build.updated:
            raise RecipeError(f"the build {build.id} has begun already")
        if wanted.from_image_registry is not None:
            raise RecipeError(
                "credentials for a registry cannot be part of a template here",
                remedy="let the operator log the server in (docs/images.md)",
            )
        if len(wanted.steps) > MOST_STEPS:
            raise LimitError(f"a template may have {MOST_STEPS} steps, not {len(wanted.steps)}")
        tenant = template.tenant
        if self._started[tenant] >= MOST_STARTED:
            raise LimitError(f"{MOST_STARTED} builds have begun already", remedy="wait until some have ended")
        self._started[tenant] += 1
        build.updated = time.time()
        task = asyncio.create_task(_Run(self, template, build, wanted).run())
        self._running.add(task)
        task.add_done_callback(lambda done: self._ended(tenant, done))

    def _ended(self, tenant: str, done: asyncio.Task[None]) -> None:
        self._running.discard(done)
        self._started[tenant] -= 1

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    # --- For one build ----------------------------------------------------------------------------------

    def room(self, tenant: str) -> asyncio.Semaphore:
        return self._room[tenant]

    async def prepare(self, tenant: str, recipe: WireRecipe) -> None:
        await self._native.prepare(await self._recipe(tenant, recipe))

    async def printed(self, tenant: str, recipe: WireRecipe, command: str) -> str:
        """What a command prints in a sandbox. Raises RecipeError if it fails."""
        async with self._native.sandbox(await self._recipe(tenant, recipe)) as sandbox:
            seen = await sandbox.exec(command, timeout=60)
        if not seen.ok:
            raise RecipeError(seen.stderr.decode(errors="replace") or f"exit code {seen.exit_code}")
        if len(seen.stdout) > LARGEST_VALUE:
            raise RecipeError(f"a value of ENV expands to more than {LARGEST_VALUE} bytes")
        return seen.stdout.decode(errors="replace")

    async def try_out(self, tenant: str, recipe: WireRecipe, limits: Limits) -> None:
        """Create a sandbox once, with its services."""
        async with self._native.sandbox(await self._recipe(tenant, recipe), limits=limits):
            pass


class _Run:
    """One build while it runs."""

    def __init__(self, builds: Builds, template: Template, build: Build, wanted: BuildStart) -> None:
        self._builds = builds
        self._template = template
        self._build = build
        self._wanted = wanted
        self._step = "base"
        self._said = 0

    async def run(self) -> None:
        build = self._build
        try:
            async with self._builds.room(self._template.tenant):
                build.status = "building"
                build.state = await self._built()
            self._builds.store.assign(self._template, build.id, build.tags)
            build.status = "ready"
        except DutyfreeError as error:
            self._fail(_text(error))
        except asyncio.CancelledError:
            self._fail("the server ended during the build")
            raise
        except Exception as error:  # noqa: BLE001 (a defect, which is logged)
            _log.exception("the build %s failed", build.id)
            self._fail(f"the server failed: {type(error).__name__}")
        finally:
            build.updated = time.time()
            with anyio.CancelScope(shield=True):
                await self._builds.store.save(self._template)

    def _fail(self, message: str) -> None:
        self._say(message, "error")
        self._build.failure = Failure(message[:SHOWN], self._step)
        self._build.status = "error"

    def _say(self, message: str, level: Any = "info") -> None:
        logs, line = self._build.logs, message[:SHOWN]
        if level == "error" or (len(logs) < LINES and self._said + len(line) <= LOG_SIZE):
            self._said += len(line)
            logs.append(BuildLog(time.time(), level, line, self._step))

    async def _built(self) -> TemplateState:
        tenant, wanted = self._template.tenant, self._wanted
        if bool(wanted.from_image) == bool(wanted.from_template):
            raise RecipeError("give either an image or a template to start from")
        if wanted.from_template:
            state = self._builds.base(tenant, wanted.from_template)
            self._say(f"FROM template {wanted.from_template}")
        else:
            image = template_steps.image_of(wanted.from_image or "")
            state = template_steps.begin(image)
            self._say(f"FROM {image or 'the usual image of this server'}")
        await self._prepare(state)
        nonce = self._build.id if wanted.force else ""
        for number, step in enumerate(wanted.steps, 1):
            self._step = str(number)
            self._say(f"[builder {number}/{len(wanted.steps)}] {step}")
            if step.force:  # this one and all above it are built again
                nonce = self._build.id
            state = await self._applied(step, state, nonce)
        self._step = "finalize"
        state = template_steps.start(state, wanted.start_cmd, wanted.ready_cmd)
        if state.recipe.services:
            self._say(f"starting {wanted.start_cmd or 'the start command'}")
            limits = Limits(cpus=self._build.cpus, memory=_bytes(self._build.memory))
            await self._builds.try_out(tenant, state.recipe, limits)
        self._say("the template is ready")
        return state

    async def _applied(self, step: TemplateStep, state: TemplateState, nonce: str) -> TemplateState:
        tenant, store = self._template.tenant, self._builds.store
        if step.type.upper() == "ENV":
            args = [
                await self._builds.printed(tenant, state.recipe, template_steps.expansion(arg))
                if place % 2 and "$" in arg
                else arg
                for place, arg in enumerate(step.args)
            ]
            step = msgspec.structs.replace(step, args=tuple(args))
        digest = store.upload(tenant, step.files_hash) if step.files_hash else None
        after = template_steps.apply(step, state, digest, nonce)
        if len(msgspec.json.encode(after)) > LARGEST_STATE:
            raise RecipeError(f"the steps and variables of a template may have {LARGEST_STATE} bytes")
        if after.recipe.stages != state.recipe.stages:
            await self._prepare(after)
        return after

    async def _prepare(self, state: TemplateState) -> None:
        begin = time.monotonic()
        await self._builds.prepare(self._template.tenant, state.recipe)
        self._say(f"done in {time.monotonic() - begin:.1f} s", "debug")


def limits_of(build: Build, network: Any) -> Limits:
    """The limits of a template's sandboxes."""
    return Limits(cpus=build.cpus, memory=_bytes(build.memory), network=network)


def _bytes(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes << 20


def _text(error: DutyfreeError) -> str:
    """What the client sees of an error. That of a stage has paths of this host, so its output alone."""
    if isinstance(error, StageError) and error.number:
        ended = "took too long" if "was stopped after" in error.message else "failed"
        return f"the command {ended}: {error.output or 'it printed nothing'}"
    return f"{error.message} ({error.remedy})" if error.remedy else error.message
