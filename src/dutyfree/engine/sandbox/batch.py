"""Several actions as frames that wait for one another in init, and what their answers say."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dutyfree.contract import (
    Action,
    Edit,
    Exec,
    Found,
    List,
    Observation,
    Read,
    Result,
    Search,
    Write,
)
from dutyfree.contract.arguments import check_bytes, check_command, check_mode, not_started
from dutyfree.contract.errors import (
    ActionError,
    ActionTimeout,
    EditError,
    RequestError,
    SandboxGone,
    file_error,
)
from dutyfree.contract.perform import check_edit as check_texts
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox import contents, search
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.observation import check, entries, observe
from dutyfree.engine.sandbox.pending import Answer, Refused, Running, Unstarted

Asked = tuple[Frame, bytes, int | None, int]

_TOLD = 1000  # bytes of a reason that init gives

AT_ONCE = 16
"""Answers that are decoded before other tasks of the event loop may run."""


async def frames(
    actions: Sequence[Action],
    payload: Callable[..., bytes],
    located: Callable[[str], bytes],
    stop_on_failure: bool,
) -> list[Asked]:
    """Raises ValueError, DispatchError for an action that cannot be asked for."""
    asked: list[Asked] = []
    try:
        for number, action in enumerate(actions):
            kind, body, descriptor = await _frame(action, payload, located)
            flags = 0 if number == 0 else protocol.AFTER | (protocol.IF_OK if stop_on_failure else 0)
            asked.append((kind, body, descriptor, flags))
    except BaseException:
        for _, _, descriptor, _ in asked:
            if descriptor is not None:
                os.close(descriptor)
        raise
    return asked


async def _frame(
    action: Action, payload: Callable[..., bytes], located: Callable[[str], bytes]
) -> tuple[Frame, bytes, int | None]:
    match action:
        case Exec(command, cwd, env, stdin, timeout, user):
            check_command(command, cwd=cwd, env=env, stdin=stdin, timeout=timeout, user=user)
            body = payload(command, cwd, env, timeout, user)
            return Frame.EXEC, body, None if stdin is None else await contents.memory_file(stdin)
        case Read(path):
            return Frame.READ, located(path), None
        case Write(path, data, mode):
            check_mode(mode)
            check_bytes(data)
            head = protocol.WRITE.pack(mode) + located(path)
            if len(data) <= protocol.INLINE_MAX:
                return Frame.WRITE, head + data, None
            return Frame.WRITE, head, await contents.memory_file(data)
        case Edit(path, old, new):
            return Frame.EDIT, edit_payload(located(path), old, new), None
        case List(path):
            return Frame.LIST, located(path), None
        case Search():
            return Frame.SEARCH, search.payload(action, located(action.path)), None


def expect(
    channel: Channel, actions: Sequence[Action], posted: Sequence[tuple[int, Running | Answer]]
) -> None:
    """Each must be done when its own time and that of all before it is over."""
    seconds = 0.0
    for action, (_, waiting) in zip(actions, posted, strict=True):
        if isinstance(action, Exec | Search):
            if action.timeout is None:
                return
            seconds += action.timeout
            channel.expect(waiting, seconds)


def ending(waiting: Running | Answer) -> asyncio.Future[Any]:
    return waiting.ended if isinstance(waiting, Running) else waiting.done


async def results(
    actions: Sequence[Action], waiting: Sequence[Running | Answer]
) -> tuple[Result | Exception, ...]:
    """Up to the first that was not carried out. Raises SubstrateError."""
    found: list[Result | Exception] = []
    skipped = [_is_skipped(one) for one in waiting]
    try:
        for action, one, left_out in zip(actions, waiting, skipped, strict=True):
            if left_out:
                break
            try:
                found.append(await _result(action, one))
                if len(found) % AT_ONCE == 0:
                    await asyncio.sleep(0)
            except SandboxGone:
                raise
            except ActionError as error:
                found.append(error)
    except BaseException:
        discard(waiting)
        raise
    return tuple(found)


def discard(waiting: Sequence[Running | Answer]) -> None:
    """Close what answers brought that nobody will look at."""
    for one in waiting:
        if isinstance(one, Answer) and one.descriptor is not None:
            os.close(one.descriptor)
            one.descriptor = None


def _is_skipped(waiting: Running | Answer) -> bool:
    if isinstance(waiting, Answer):
        return waiting.done.exception() is None and waiting.done.result() == errno.ECANCELED
    error = waiting.ended.exception()
    return isinstance(error, Refused) and error.number == errno.ECANCELED


async def _result(action: Action, waiting: Running | Answer) -> Result:
    if isinstance(waiting, Running):
        assert isinstance(action, Exec)
        return _observation(action, waiting)
    error = waiting.done.result()
    match action:
        case Edit():
            check_edit(waiting, action.path)
            return None
        case Search():
            return await search_result(action, waiting)
        case Exec():
            raise AssertionError("a command's answer is not a file's")
    check(error, action.path)
    match action:
        case Read():
            if waiting.descriptor is not None:
                descriptor, waiting.descriptor = waiting.descriptor, None
                return await contents.read_whole(descriptor, action.path)
            return waiting.data[0]
        case List():
            return await entries(b"".join(waiting.data))
        case Write():
            return None


def _observation(action: Exec, running: Running) -> Observation:
    """Its time begins when its turn came, and ends with it: the rest of the batch is none of it."""
    try:
        ended = running.ended.result()
    except Unstarted as error:
        return not_started(error.message)
    received, sent = ended[2], ended[6]
    seen = observe(action.command, action.user, action.cwd, running, ended, received / 1e9)
    if len(seen.spans) == 1:
        return seen  # it never ran
    return msgspec.structs.replace(seen, seconds=(sent - received) / 1e9, spans=seen.spans[:-1])


# --- Edits and searches -----------------------------------------------------------------------------


def edit_payload(located: bytes, old: bytes, new: bytes) -> bytes:
    """Raises RequestError, FileError and ArgumentError."""
    check_texts(old, new)
    if len(old) + len(new) + len(located) + protocol.EDIT.size > protocol.FRAME_MAX:
        raise file_error(errno.EFBIG, os.fsdecode(located[:-1]))
    return protocol.EDIT.pack(len(old), len(new)) + located + old + new


def check_edit(answer: Answer, path: str) -> None:
    """Raises EditError, FileError."""
    error = answer.done.result()
    said = b"".join(answer.data)[:_TOLD]
    if error == protocol.ERROR_NOT_ONCE and len(said) >= protocol.NUMBER.size:
        count, *lines = struct.unpack(f"={len(said) // 4}I", said[: len(said) // 4 * 4])
        raise EditError(path, count, tuple(lines))
    check(error, path)


async def search_result(asked: Search, answer: Answer) -> Found:
    """Raises ActionError."""
    error = answer.done.result()
    said = b"".join(answer.data)
    if error == protocol.ERROR_PATTERN:
        reason = said[:_TOLD].decode(errors="replace")
        raise RequestError(f"not a regular expression: {asked.text!r}: {reason}", kind="pattern")
    if error == errno.ETIMEDOUT:
        raise ActionTimeout(f"the search took more than {asked.timeout:g} s")
    check(error, asked.path)
    return await search.found(asked, said)
