"""The lifecycle of a sandbox: created from its recipe, separate from others, removed at its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.to_thread

from dutyfree.conformance import expect
from dutyfree.conformance.suite import at_once, in_sandbox, on_substrate
from dutyfree.conformance.trees import local_directory
from dutyfree.contract import Recipe, Sandbox, Stage, Substrate
from dutyfree.contract.abilities import Countable
from dutyfree.contract.errors import CreateError, SandboxClosed


@on_substrate()
async def nouns(substrate: Substrate) -> None:
    """Substrate and sandbox have the contract's methods, names, facts and spans."""
    expect.that(isinstance(substrate, Substrate), f"{type(substrate).__name__} is no contract.Substrate")
    expect.that(substrate.name, "the substrate has no name")
    for key, value in (await substrate.facts()).items():
        expect.that(isinstance(key, str) and isinstance(value, str), f"fact {key!r}: {value!r} is not text")
    async with substrate.sandbox(labels={"purpose": "conformance"}) as one, substrate.sandbox() as other:
        expect.that(isinstance(one, Sandbox), f"{type(one).__name__} is no contract.Sandbox")
        expect.that(one.id and one.id != other.id, f"ids {one.id!r} and {other.id!r}")
        for span in one.spans:
            expect.that(span.start >= 0 and span.seconds >= 0, f"a negative span: {span}")


@in_sandbox()
async def fresh_directory_is_empty(sandbox: Sandbox) -> None:
    """The working directory of a sandbox without a recipe is empty: no sockets, no leftovers."""
    expect.equal([entry.name for entry in await sandbox.list(".")], [], "names in the working directory")


@on_substrate()
async def fresh_after_another(substrate: Substrate) -> None:
    """A sandbox has nothing of an earlier sandbox."""
    for _ in range(3):
        async with substrate.sandbox() as sandbox:
            with expect.raises(FileNotFoundError, "read of a former sandbox's file"):
                await sandbox.read("trace")
            await sandbox.write("trace", b"left behind")


@on_substrate("commands")
async def fresh_environment(substrate: Substrate) -> None:
    """Variables of one sandbox are not visible in another."""
    async with substrate.sandbox() as sandbox:
        await sandbox.exec("export LEFT_BEHIND=1; echo $LEFT_BEHIND", env={"LEFT_BEHIND": "1"})
    async with substrate.sandbox() as sandbox:
        seen = await sandbox.exec(["printenv", "LEFT_BEHIND"])
        expect.equal(seen.stdout, b"", "a former sandbox's variable")


@on_substrate()
async def sandboxes_are_apart(substrate: Substrate) -> None:
    """Two sandboxes at once have their own files."""
    async with substrate.sandbox() as one, substrate.sandbox() as other:
        await one.write("file", b"one")
        await other.write("file", b"other")
        await one.write("only one", b"")
        expect.equal(await one.read("file"), b"one", "content in the first")
        expect.equal(await other.read("file"), b"other", "content in the second")
        with expect.raises(FileNotFoundError, "read of the other's file"):
            await other.read("only one")


@on_substrate(deadline=120)
async def sandboxes_at_once(substrate: Substrate) -> None:
    """Eight sandboxes created at once are all created, and are separate."""
    arrived = 0
    all_here = anyio.Event()

    async def one(number: int) -> None:
        nonlocal arrived
        async with substrate.sandbox() as sandbox:
            await sandbox.write("number", str(number).encode())
            arrived += 1
            if arrived == 8:
                all_here.set()
            await all_here.wait()
            expect.equal(await sandbox.read("number"), str(number).encode(), f"the file of sandbox {number}")

    await at_once(one, range(8))


def _plant(local: Path) -> Recipe:
    (local / "file").write_bytes(b"from the host")
    (local / "tree" / "sub").mkdir(parents=True)
    (local / "tree" / "sub" / "file").write_bytes(b"in a tree")
    stage = Stage("files", files={"given/file": local / "file", "given/tree": local / "tree"})
    return Recipe(stages=(stage,))


@on_substrate(deadline=120)
async def recipe_files(substrate: Substrate) -> None:
    """A recipe's files are in each new sandbox, unchanged by earlier ones."""
    async with local_directory() as local:
        recipe = await anyio.to_thread.run_sync(_plant, local)
        await substrate.prepare(recipe)
        await substrate.prepare(recipe)
        for _ in range(2):
            async with substrate.sandbox(recipe) as sandbox:
                expect.equal(await sandbox.read("given/file"), b"from the host", "a file of the recipe")
                expect.equal(await sandbox.read("given/tree/sub/file"), b"in a tree", "a tree of the recipe")
                await sandbox.write("given/file", b"changed")
                await sandbox.remove("given/tree")


@on_substrate("commands", deadline=120)
async def recipe_commands(substrate: Substrate) -> None:
    """A new sandbox is after all stages of its recipe, in order, with or without prepare."""
    async with local_directory() as local:
        planted = await anyio.to_thread.run_sync(_plant, local)
        first = Stage("dependencies", commands=("cat given/file > made", ("mkdir", "two words")))
        second = Stage("setup", commands=("printf ' twice' >> made",))
        recipe = Recipe(stages=(*planted.stages, first, second))
        for prepared in (False, True):
            if prepared:
                await substrate.prepare(recipe)
            async with substrate.sandbox(recipe) as sandbox:
                expect.equal(
                    await sandbox.read("made"), b"from the host twice", "what the recipe's commands made"
                )
                expect.equal(await sandbox.list("two words"), (), "the directory a command made")
                await sandbox.write("made", b"changed")
    async with substrate.sandbox() as sandbox:
        expect.equal(await sandbox.list("."), (), "the sandbox without the recipe")


@on_substrate("commands", deadline=120)
async def recipe_that_fails(substrate: Substrate) -> None:
    """A stage that fails raises CreateError with the name of the stage; the substrate stays usable."""
    recipe = Recipe(stages=(Stage("setup", commands=("true",)), Stage("dependencies", commands=("exit 3",))))
    for attempt in ("sandbox", "prepare", "sandbox again"):
        try:
            if attempt == "prepare":
                await substrate.prepare(recipe)
            else:
                async with substrate.sandbox(recipe):
                    pass
        except CreateError as error:
            expect.that("dependencies" in str(error), f"the error does not name the stage: {error}")
        else:
            # A substrate that prepares nothing may fail only at the creation.
            expect.that(attempt == "prepare", f"{attempt}: nothing was raised, expected CreateError")
    async with substrate.sandbox() as sandbox:
        expect.succeeded(await sandbox.exec("true"), "a command in the next sandbox")


@on_substrate()
async def recipe_with_a_missing_file(substrate: Substrate) -> None:
    """A recipe with a file that is missing on this host raises CreateError."""
    recipe = Recipe(stages=(Stage("files", files={"file": Path("/no/such/file")}),))
    with expect.raises(CreateError, "a sandbox with a missing file"):
        async with substrate.sandbox(recipe):
            pass


@on_substrate(deadline=120)
async def cancelled_creation(substrate: Substrate) -> None:
    """A creation can be cancelled at any moment; no sandbox is left, and the substrate stays usable."""
    before = set(await substrate.sandboxes()) if isinstance(substrate, Countable) else set()
    for delay in (0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3):
        with anyio.move_on_after(delay):
            async with substrate.sandbox():
                await anyio.sleep(delay)
    if isinstance(substrate, Countable):
        expect.equal(set(await substrate.sandboxes()) - before, set(), "sandboxes left behind")
    async with substrate.sandbox() as sandbox:
        await sandbox.write("file", b"usable")
        expect.equal(await sandbox.read("file"), b"usable", "a file in the next sandbox")


@on_substrate()
async def errors_in_the_body_pass(substrate: Substrate) -> None:
    """An error in the body of the context passes unchanged, and the sandbox is closed."""

    class MineError(Exception):
        pass

    with expect.raises(MineError, "the body's own error"):
        async with substrate.sandbox() as sandbox:
            raise MineError
    with expect.raises(SandboxClosed, "read after the body failed"):
        await sandbox.read("file")


@on_substrate()
async def use_after_close(substrate: Substrate) -> None:
    """Every method raises SandboxClosed after the end of the context."""
    async with substrate.sandbox() as sandbox:
        await sandbox.write("file", b"")
    async with local_directory() as local:
        await anyio.to_thread.run_sync((local / "file").write_bytes, b"")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "exec": lambda: sandbox.exec("true"),
            "read": lambda: sandbox.read("file"),
            "write": lambda: sandbox.write("file", b""),
            "list": lambda: sandbox.list("."),
            "remove": lambda: sandbox.remove("file"),
            "upload": lambda: sandbox.upload(local / "file", "file"),
            "download": lambda: sandbox.download("file", local / "back"),
        }
        for name, call in calls.items():
            with expect.raises(SandboxClosed, f"{name} after the close"):
                await call()
