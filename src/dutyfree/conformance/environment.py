"""The recipe's environment variables, in every way to run a command."""

from __future__ import annotations

from collections.abc import AsyncIterator

from dutyfree.conformance import expect
from dutyfree.conformance.suite import on_substrate
from dutyfree.contract import Exec, Observation, Recipe, Sandbox, Stage, Substrate
from dutyfree.contract.abilities import (
    BackgroundProcesses,
    Batching,
    Chunk,
    Forkable,
    Pooling,
    Resettable,
    ShellSessions,
    Snapshottable,
    Streaming,
    Terminals,
)

SAY = ["printenv", "GIVEN"]
GIVEN = Recipe(env={"GIVEN": "by the recipe"})


async def _said(sandbox: Sandbox, env: dict[str, str] | None = None) -> str:
    return (await sandbox.exec(SAY, env=env)).stdout.decode()


@on_substrate()
async def recipe_environment(substrate: Substrate) -> None:
    """Every command has the recipe's variables; those of the call override them; other sandboxes do not."""
    async with substrate.sandbox(GIVEN) as sandbox:
        expect.equal(await _said(sandbox), "by the recipe\n", "a variable of the recipe")
        seen = await sandbox.exec(SAY, env={"OTHER": "1"})
        expect.equal(seen.stdout, b"by the recipe\n", "a variable of the recipe beside one of the call")
        expect.equal(await _said(sandbox, {"GIVEN": "by the call"}), "by the call\n", "one of the call")
        expect.equal(await _said(sandbox), "by the recipe\n", "the recipe's after the call's")
    async with substrate.sandbox() as sandbox:
        expect.equal(await _said(sandbox), "", "a variable of another sandbox's recipe")
    async with substrate.sandbox(Recipe(env={"GIVEN": "by another $HOME"})) as sandbox:
        expect.equal(await _said(sandbox), "by another $HOME\n", "a value with a dollar sign, as it stands")


@on_substrate("commands", deadline=120)
async def recipe_environment_is_not_of_stages(substrate: Substrate) -> None:
    """Stages do not get the recipe's variables, so recipes that differ only in them have the same files."""
    stages = (Stage("setup", commands=("echo ${GIVEN:-nothing} > seen",)),)
    for value in ("one", "two"):
        async with substrate.sandbox(Recipe(stages=stages, env={"GIVEN": value})) as sandbox:
            expect.equal(await sandbox.read("seen"), b"nothing\n", "what the stage saw")
            expect.equal(await _said(sandbox), f"{value}\n", "what a command sees")


@on_substrate("commands", deadline=120)
async def recipe_path(substrate: Substrate) -> None:
    """The recipe's path comes before the usual PATH; relative entries start at the working directory."""
    tool = "mkdir bin; printf '#!/bin/sh\\necho found' > bin/tool; chmod +x bin/tool"
    stages = (Stage("setup", commands=(tool,)),)
    async with substrate.sandbox() as plain:
        usual = (await plain.exec(["printenv", "PATH"])).stdout.decode().strip()
    async with substrate.sandbox(Recipe(stages=stages, path=("bin", "/opt/more"))) as sandbox:
        for cwd in (None, "/"):
            seen = await sandbox.exec(["tool"], cwd=cwd)
            expect.equal(seen.stdout, b"found\n", f"a program of the path, with cwd={cwd!r}")
        seen = await sandbox.exec(["printenv", "PATH"])
        wanted = f"{sandbox.workdir}/bin:/opt/more:{usual}\n"
        expect.equal(seen.stdout.decode(), wanted, "PATH")
        seen = await sandbox.exec("printenv PATH", env={"PATH": "/usr/bin:/bin"})
        expect.equal(seen.stdout, b"/usr/bin:/bin\n", "PATH of the call")
    given = Recipe(stages=stages, path=("bin",), env={"PATH": "/usr/bin:/bin"})
    async with substrate.sandbox(given) as sandbox:
        seen = await sandbox.exec(["printenv", "PATH"])
        wanted = f"{sandbox.workdir}/bin:/usr/bin:/bin\n"
        expect.equal(seen.stdout.decode(), wanted, "PATH of a recipe that gives both")


@on_substrate("commands")
async def recipe_environment_is_not_of_files(substrate: Substrate) -> None:
    """Reading, writing and listing do not depend on variables that break commands."""
    async with substrate.sandbox(Recipe(env={"PATH": "/nowhere"})) as sandbox:
        await sandbox.write("sub/file", b"there")
        expect.equal(await sandbox.read("sub/file"), b"there", "a file")
        expect.equal([entry.name for entry in await sandbox.list("sub")], ["file"], "names in a directory")
        await sandbox.remove("sub")
        expect.equal((await sandbox.exec(["printenv", "PATH"])).exit_code, 127, "a command without a PATH")


@on_substrate(deadline=120)
async def recipe_environment_reaches_all(substrate: Substrate) -> None:
    """The recipe's variables are there in every way to run a command that the sandbox has."""
    async with substrate.sandbox(GIVEN) as sandbox:
        async for way, said in _ways(sandbox):
            expect.equal(said.strip(), b"by the recipe", f"a variable of the recipe, by {way}")


async def _ways(sandbox: Sandbox) -> AsyncIterator[tuple[str, bytes]]:
    if isinstance(sandbox, Batching):
        (result,) = await sandbox.batch([Exec(tuple(SAY))])
        yield "batch", result.stdout if isinstance(result, Observation) else b""
    if isinstance(sandbox, Streaming):
        chunks = [one async for one in sandbox.stream(SAY)]
        yield "stream", b"".join(one.data for one in chunks if isinstance(one, Chunk))
    if isinstance(sandbox, ShellSessions):
        async with sandbox.shell() as shell:
            yield "shell", (await shell.run("printenv GIVEN")).stdout
    if isinstance(sandbox, BackgroundProcesses):
        yield "start", (await (await sandbox.start(SAY)).wait()).stdout
    if isinstance(sandbox, Terminals):
        async with sandbox.terminal(SAY) as terminal:
            said = b""
            while part := await terminal.read():
                said += part
        yield "terminal", said


@on_substrate(deadline=120)
async def recipe_environment_stays(substrate: Substrate) -> None:
    """The recipe's variables are there after a reset, in forks, in groups, and in a snapshot's recipe."""
    async with substrate.sandbox(GIVEN) as sandbox:
        if isinstance(sandbox, Resettable):
            await sandbox.reset()
            expect.equal(await _said(sandbox), "by the recipe\n", "after a reset")
        if isinstance(sandbox, Forkable):
            async with sandbox.fork(2) as children:
                for child in children:
                    expect.equal(await _said(child), "by the recipe\n", "in a fork")
        if isinstance(sandbox, Snapshottable):
            async with substrate.sandbox(await sandbox.snapshot()) as copy:
                expect.equal(await _said(copy), "by the recipe\n", "in a snapshot")
    if isinstance(substrate, Pooling):
        async with substrate.group(GIVEN, 2) as group:
            for one in group:
                expect.equal(await _said(one), "by the recipe\n", "in a group")
