"""What substrates without images of their own do alike: carry out a stage, tell the tools' versions."""

from __future__ import annotations

from dutyfree.contract import Sandbox, Stage
from dutyfree.errors import CreateError

TAIL = 2000
"""Bytes of a failed command's output that its error tells."""


async def apply(sandbox: Sandbox, stage: Stage) -> None:
    """Copy the stage's files in, then run its commands. Raises CreateError naming stage and command."""
    for path, source in stage.files.items():
        try:
            await sandbox.upload(source, path)
        except OSError as error:
            raise CreateError(f"stage {stage.kind!r}: cannot copy {source}: {error}") from error
    for command in stage.commands:
        seen = await sandbox.exec(command)
        if not seen.ok:
            tail = (seen.stderr or seen.stdout)[-TAIL:].decode(errors="replace").strip()
            raise CreateError(f"stage {stage.kind!r}: {command!r} ended with {seen.exit_code}: {tail}")


async def tools(sandbox: Sandbox) -> dict[str, str]:
    """The versions and paths of Python and git, as facts."""
    facts = {}
    for tool in ("python3", "git"):
        seen = await sandbox.exec(f"command -v {tool} && {tool} --version")
        lines = seen.stdout.decode(errors="replace").split("\n")
        if seen.ok:
            facts[tool.removesuffix("3")] = lines[1].split()[-1]
            facts[f"{tool.removesuffix('3')}_path"] = lines[0]
    return facts
