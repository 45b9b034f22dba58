"""Perform actions that are data: for harnesses, studies and batches."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dutyfree.contract.abilities import Editing, Searching
from dutyfree.contract.action import Action, Edit, Exec, List, Read, Result, Search, Write
from dutyfree.contract.arguments import check_actions, check_bytes
from dutyfree.contract.errors import ActionError, EditError, RequestError, SandboxGone, UsageError
from dutyfree.contract.observation import Observation
from dutyfree.contract.sandbox import Sandbox


async def perform(sandbox: Sandbox, action: Action) -> Result:
    """Perform one action. Raises the errors of the sandbox, and EditError.

    If the sandbox cannot edit, the file is read, changed and written from here. If it cannot search, a search
    raises UsageError.
    """
    match action:
        case Exec(command, cwd, env, stdin, timeout, user):
            return await sandbox.exec(command, cwd=cwd, env=env, stdin=stdin, timeout=timeout, user=user)
        case Read(path):
            return await sandbox.read(path)
        case Write(path, data, mode):
            await sandbox.write(path, data, mode=mode)
        case List(path):
            return await sandbox.list(path)
        case Edit(path, old, new) if isinstance(sandbox, Editing):
            await sandbox.edit(path, old, new)
        case Edit(path, old, new):
            await sandbox.write(path, edited(path, await sandbox.read(path), old, new))
        case Search() if isinstance(sandbox, Searching):
            return await sandbox.search(**msgspec.structs.asdict(action))
        case Search():
            raise UsageError("this substrate cannot search", remedy="run grep or find with exec")
    return None


async def in_order(
    sandbox: Sandbox, actions: Sequence[Action], *, stop_on_failure: bool = True
) -> tuple[Result | Exception, ...]:
    """Perform a batch as ``Batching.batch`` does, with one round trip for each action."""
    check_actions(actions)
    results: list[Result | Exception] = []
    for action in actions:
        try:
            result: Result | Exception = await perform(sandbox, action)
        except SandboxGone:
            raise
        except ActionError as error:
            result = error
        results.append(result)
        if stop_on_failure and failed(result):
            break
    return tuple(results)


def failed(result: Result | Exception) -> bool:
    """Whether a result is an error, or a command that failed."""
    return isinstance(result, Exception) or (isinstance(result, Observation) and not result.ok)


def edited(path: str, text: bytes, old: bytes, new: bytes) -> bytes:
    """Return the text with ``old`` replaced. Raises EditError, and the errors of ``check_edit``."""
    check_edit(old, new)
    count = text.count(old)
    if count != 1:
        raise EditError(path, count, _lines(text, old))
    return text.replace(old, new)


def check_edit(old: bytes, new: bytes) -> None:
    """Raises ArgumentError, and RequestError if ``old`` is empty."""
    check_bytes(old, "the text to replace")
    check_bytes(new, "the new text")
    if not old:
        raise RequestError("the text to replace is empty", kind="edit")


def _lines(text: bytes, old: bytes) -> tuple[int, ...]:
    """The numbers of the first lines in which ``old`` begins."""
    lines: list[int] = []
    at = text.find(old)
    while at >= 0 and len(lines) < 16:
        lines.append(text.count(b"\n", 0, at) + 1)
        at = text.find(old, at + len(old))
    return tuple(lines)
