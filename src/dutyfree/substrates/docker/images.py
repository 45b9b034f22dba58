"""Images in a Docker engine: the study's image, pulled images, and images built from recipes."""

from __future__ import annotations

import hashlib
import posixpath
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from dutyfree import study_image as study
from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import ActionError, CreateError, SubstrateError, Unavailable
from dutyfree.engine.layers import run_stage as stages
from dutyfree.substrates.docker.engine import Engine, EngineError, EngineLost
from dutyfree.substrates.docker.sandbox import WORKDIR, DockerSandbox

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DIGEST_LABEL = "dutyfree.digest"
RECIPES = "dutyfree/recipe"
BAKED = "dutyfree.baked"
"""The label of images that stay for later runs."""
COPY = "/.dutyfree/workspace"
"""Where an image keeps a copy of its working directory."""
TAIL = 800
"""Bytes of a failed command's output in the error."""

Builder = Callable[[str], AbstractAsyncContextManager[DockerSandbox]]
"""Gives a container of an image, to run a stage in."""


class RecipeImages:
    """Finds or builds the image of a recipe; each image is built once at a time."""

    def __init__(
        self, engine: Engine, default: str, builder: Builder, owner: str, *, copied: bool = False
    ) -> None:
        """``owner`` is the label of images that are removed with it; "" for images that stay.

        ``copied``: the images have a copy of the working directory at COPY, because a mount hides it.
        """
        self._engine = engine
        self._copied = copied
        self._default = default
        self._builder = builder
        self._owner = owner
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._found: dict[bytes, str] = {}
        """Recipe (by the names of its files, because hashing takes time) → image id."""
        self._configs: dict[str, Mapping[str, Any]] = {}

    async def of(self, recipe: Recipe) -> str:
        """The id of the recipe's image; builds it if it is unknown. Raises CreateError."""
        return self._found.get(_name(recipe)) or await self.prepare(recipe)

    async def prepare(self, recipe: Recipe) -> str:
        """The id of the recipe's image, after a check that everything is up to date. Raises CreateError."""
        try:
            found = await self._base(recipe.image or self._default)
            for number in range(1, len(recipe.stages) + 1):
                found = await self._stage(recipe, number, found)
            if self._copied:
                found = await self._copy(found)
        except EngineLost as error:
            raise CreateError(str(error)) from error
        except EngineError as error:
            raise CreateError(f"the Docker engine could not build the image: {error}") from error
        self._found[_name(recipe)] = found
        return found

    async def config(self, image: str) -> Mapping[str, Any]:
        """The configuration of an image, by its id: environment, user, … Raises CreateError."""
        if image not in self._configs:
            try:
                held = await inspect(self._engine, image) or {}
            except (EngineError, EngineLost) as error:
                raise CreateError(f"the Docker engine does not answer: {error}") from error
            self._configs[image] = held.get("Config") or {}
        return self._configs[image]

    async def _base(self, reference: str) -> str:
        async with self._locks[reference]:
            try:
                if reference == study.REFERENCE:
                    return await import_study(self._engine)
                return await identify(self._engine, reference) or await pull(self._engine, reference)
            except Unavailable as error:
                raise CreateError(error.message, remedy=error.remedy) from error

    async def _stage(self, recipe: Recipe, number: int, base: str) -> str:
        """The image of the first ``number`` stages; ``base`` is the image of the stages before."""
        try:
            contents = await anyio.to_thread.run_sync(recipe.key, number)
        except OSError as error:
            raise CreateError(f"a file of stage {number} cannot be read: {error}") from error
        # With the id of the base, because the same recipe on a newer image is another image. With the owner,
        # because a substrate removes its images when it closes, so no other may use them; it does not remove
        # baked ones, which have no owner.
        key = hashlib.sha256(f"{base} {contents} {self._owner}".encode()).hexdigest()[:32]
        async with self._locks[key]:
            found = await identify(self._engine, f"{RECIPES}:{key}")
            return found or await self._build(recipe.stages[number - 1], number, base, key)

    async def _copy(self, base: str) -> str:
        """The same image with a copy of its working directory."""
        key = hashlib.sha256(f"{base} copy {self._owner}".encode()).hexdigest()[:32]
        async with self._locks[key]:
            if found := await identify(self._engine, f"{RECIPES}:{key}"):
                return found
            async with self._builder(base) as sandbox:
                command = f"mkdir -p {posixpath.dirname(COPY)} && cp -a {WORKDIR} {COPY}"
                await _must_succeed(sandbox, command, "the copy of the working directory", {})
                return await self._commit(sandbox, key)

    async def _build(self, stage: Stage, number: int, base: str, key: str) -> str:
        title = f"stage {number} ({stage.kind})"
        secrets = stages.secrets_of(stage, number)
        async with self._builder(base) as sandbox:
            for path, source in stage.files.items():
                try:
                    await sandbox.upload(source, path)
                except (ActionError, OSError, SubstrateError) as error:
                    raise CreateError(f"{title}: {source} could not be copied to {path}: {error}") from error
            for command in stage.commands:
                await _must_succeed(sandbox, command, title, secrets)
            return await self._commit(sandbox, key)

    async def _commit(self, sandbox: DockerSandbox, key: str) -> str:
        query: dict[str, object] = {
            "container": sandbox.id,
            "repo": RECIPES,
            "tag": key,
            "comment": "a stage of a recipe",
        }
        if not self._owner:  # without the labels of the container: the image outlives its owner
            query["changes"] = [f"LABEL {BAKED}=1", "LABEL dutyfree.owner=", "LABEL dutyfree.process="]
        made = await self._engine.request("POST", "/commit", query=query, json={})
        return str(made["Id"])


def path(config: Mapping[str, Any]) -> str:
    """The PATH of an image, or the engine's default."""
    variables = config.get("Env") or ()
    return next((one[len("PATH=") :] for one in variables if one.startswith("PATH=")), PATH)


async def _must_succeed(
    sandbox: DockerSandbox, command: str | tuple[str, ...], title: str, secrets: Mapping[str, str]
) -> None:
    text = command if isinstance(command, str) else " ".join(command)
    try:
        seen = await sandbox.exec(command, env=secrets or None)
    except (ActionError, SubstrateError) as error:
        raise CreateError(f"{title}: `{text}` could not be run: {error}") from error
    if not seen.ok:
        said = stages.hide(seen.stdout + seen.stderr, secrets)
        output = said[-TAIL:].decode(errors="replace").strip()
        raise CreateError(f"{title}: `{text}` failed with exit code {seen.exit_code}: {output}")


def _name(recipe: Recipe) -> bytes:
    stages = [
        [stage.kind, stage.commands, {k: str(v) for k, v in stage.files.items()}] for stage in recipe.stages
    ]
    return msgspec.json.encode([recipe.image, stages])


async def remove(engine: Engine, images: Sequence[str]) -> None:
    """Remove images, children before their parents. Images in use stay. Raises EngineLost."""
    left = list(images)
    while left:
        refused = []
        for image in left:
            try:
                await engine.request("DELETE", f"/images/{image}", deadline=engine.remove_seconds)
            except EngineError:
                refused.append(image)
        if len(refused) == len(left):
            return
        left = refused


async def identify(engine: Engine, reference: str) -> str | None:
    """The id of an image in the engine; None if it has none."""
    facts = await inspect(engine, reference)
    return None if facts is None else str(facts["Id"])


async def inspect(engine: Engine, reference: str) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = await engine.request("GET", f"/images/{reference}/json")
    except EngineError as error:
        if error.status == 404:
            return None
        raise
    return facts


async def import_study(engine: Engine, progress: study.Progress | None = None) -> str:
    """Import the study's image from the cache, if the engine does not have this build. Returns its id.

    An image that ``adopt_image`` has put under the name stays, unless ``study_image.build``
    was called later. Raises Unavailable if the image must be built and cannot be.
    """
    held = await inspect(engine, study.REFERENCE)
    built = await anyio.to_thread.run_sync(study.built)
    if held and (built is None or await anyio.to_thread.run_sync(_stays, held, built)):
        return str(held["Id"])
    built = built or await study.build(progress=progress, choose=False)
    repository, _, tag = study.REFERENCE.partition(":")
    changes = [f"ENV {name}={value}" for name, value in study.ENVIRONMENT.items()]
    changes += [f"LABEL {DIGEST_LABEL}={built.digest}", f"WORKDIR {WORKDIR}", 'CMD ["/bin/bash"]']
    query = {"fromSrc": "-", "repo": repository, "tag": tag, "changes": changes}
    with await anyio.to_thread.run_sync(built.tar.open, "rb") as tar:
        await _messages(engine, query, progress, content=tar, size=built.size)
    found = await identify(engine, study.REFERENCE)
    if found is None:
        raise Unavailable(f"the Docker engine did not import {built.tar}")
    if held and held["Id"] != found:
        await remove(engine, [held["Id"]])
    return found


def _stays(held: dict[str, Any], built: study.StudyImage) -> bool:
    digest = ((held.get("Config") or {}).get("Labels") or {}).get(DIGEST_LABEL)
    return not study.chosen() if digest is None else bool(digest == built.digest)


async def pull(engine: Engine, reference: str, progress: study.Progress | None = None) -> str:
    """Pull an image from its registry. Returns its id. Raises Unavailable."""
    name, _, tag = reference.rpartition(":")
    query = {"fromImage": reference}
    if "@" not in reference and (not name or "/" in tag):
        query["tag"] = "latest"  # without a tag the engine pulls all tags
    try:
        await _messages(engine, query, progress)
        found = await identify(engine, reference)
    except EngineError as error:
        raise Unavailable(
            f"the image {reference} is not in the Docker engine and cannot be pulled: {error}",
            remedy="check its name and the connection to its registry, or `docker load` it",
        ) from error
    if found is None:
        raise Unavailable(f"the Docker engine pulled {reference}, but does not have it")
    return found


async def _messages(
    engine: Engine, query: dict[str, Any], progress: study.Progress | None, **content: Any
) -> None:
    """Create an image and report its progress. Errors are messages in the stream. Raises EngineError."""
    rest = b""
    last = ""
    async with engine.stream("POST", "/images/create", query=query, **content) as response:
        async for piece in response.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in filter(None, (line.strip() for line in lines)):
                message = msgspec.json.decode(line)
                if "error" in message:
                    raise EngineError(500, str(message["error"]))
                text = " ".join(str(message[part]) for part in ("id", "status") if part in message)
                if progress is not None and text != last:
                    progress(text)
                last = text


async def adopt(
    engine: Engine,
    reference: str,
    name: str,
    tools: Sequence[str],
    builder: Builder,
    progress: study.Progress,
) -> str:
    """Pull ``reference`` if it is missing, check that it has the tools, and tag it ``name``. Returns its id.

    Raises Unavailable.
    """
    found = await identify(engine, reference) or await pull(engine, reference, progress)
    progress(f"checking that it has {', '.join(tools)}")
    try:
        async with builder(found) as sandbox:
            for tool in tools:
                if not (await sandbox.exec(f"command -v {tool}")).ok:
                    raise Unavailable(f"the image {reference} lacks {tool}", remedy="choose one that has it")
    except SubstrateError as error:
        raise Unavailable(f"the image {reference} cannot be used: {error}") from error
    repository, _, tag = name.partition(":")
    await engine.request("POST", f"/images/{found}/tag", query={"repo": repository, "tag": tag})
    return found
