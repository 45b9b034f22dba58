"""Batches: several actions as frames in one write. Init runs them one after the other."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence

import anyio
import msgspec

from dutyfree.contract import Action, Edit, Exec, List, Observation, Read, Result, Search, Write
from dutyfree.contract.arguments import check_exec, not_started
from dutyfree.contract.errors import ActionError, SandboxGone
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox import contents, files, search
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.observation import check, entries, observe
from dutyfree.engine.sandbox.pending import (
    CommandNotStarted,
    CommandRejected,
    Pending,
    PendingCommand,
    PendingOperation,
)

EncodedAction = tuple[Frame, bytes, int | None, int]
"""Kind, payload, descriptor, flags."""

RESULTS_AT_ONCE = 16
"""Results that are decoded before other tasks of the event loop may run."""


async def encode(
    actions: Sequence[Action],
    encode_command: Callable[[Exec], bytes],
    encode_path: Callable[[str], bytes],
    *,
    stop_on_failure: bool,
) -> list[EncodedAction]:
    """Raises ActionError for an action that cannot be sent, UsageError and DispatchError."""
    encoded: list[EncodedAction] = []
    try:
        for number, action in enumerate(actions):
            kind, body, descriptor = await _encode(action, encode_command, encode_path)
            flags = 0 if number == 0 else protocol.AFTER | (protocol.IF_OK if stop_on_failure else 0)
            encoded.append((kind, body, descriptor, flags))
    except BaseException:
        for _, _, descriptor, _ in encoded:
            if descriptor is not None:
                os.close(descriptor)
        raise
    return encoded


async def _encode(
    action: Action, encode_command: Callable[[Exec], bytes], encode_path: Callable[[str], bytes]
) -> tuple[Frame, bytes, int | None]:
    match action:
        case Exec(stdin=stdin):
            check_exec(action)
            body = encode_command(action)
            return Frame.EXEC, body, None if stdin is None else await contents.memory_file(stdin)
        case Read(path):
            return Frame.READ, encode_path(path), None
        case Write(path, data, mode):
            return Frame.WRITE, *await files.encode_write(encode_path, path, data, mode)
        case Edit(path, old, new):
            return Frame.EDIT, files.encode_edit(encode_path(path), old, new), None
        case List(path):
            return Frame.LIST, encode_path(path), None
        case Search():
            return Frame.SEARCH, search.encode(action, encode_path(action.path)), None


async def run(
    channel: Channel, actions: Sequence[Action], encoded: Sequence[EncodedAction]
) -> tuple[Result | Exception, ...]:
    """Send encoded actions and wait for all results. If cancelled, kill what runs and start no more."""
    posted = channel.post_all(encoded)  # closes the descriptors, also if it fails
    _expect(channel, actions, posted)
    pending = [one for _, one in posted]
    try:
        await asyncio.wait([one.future for one in pending])
    except asyncio.CancelledError:
        # From the last to the first, so that no action starts because the one before it was killed.
        for identity, one in reversed(posted):
            future = one.future
            future.add_done_callback(lambda ended: ended.exception())  # marks it as retrieved
            if not future.done():
                channel.kill(identity)
        if not channel.frozen:
            with anyio.CancelScope(shield=True):
                await asyncio.wait([one.future for one in pending])
        _discard(pending)
        raise
    return await results(actions, pending)


def _expect(channel: Channel, actions: Sequence[Action], posted: Sequence[tuple[int, Pending]]) -> None:
    """Set the deadline of each action: its own timeout plus those of all actions before it."""
    seconds = 0.0
    for action, (_, one) in zip(actions, posted, strict=True):
        if isinstance(action, Exec | Search):
            if action.timeout is None:
                return
            seconds += action.timeout
            channel.expect(one, seconds)


async def results(actions: Sequence[Action], pending: Sequence[Pending]) -> tuple[Result | Exception, ...]:
    """The results up to the first action that was skipped. Raises SubstrateError."""
    found: list[Result | Exception] = []
    room = contents.LARGEST  # for all files that are read, as for one
    skipped = [_is_skipped(one) for one in pending]
    try:
        for action, one, left_out in zip(actions, pending, skipped, strict=True):
            if left_out:
                break
            try:
                found.append(await _result(action, one, room))
                if isinstance(action, Read):
                    room -= len(found[-1])  # type: ignore[arg-type]  # its content
                if len(found) % RESULTS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            except SandboxGone:
                raise
            except ActionError as error:
                found.append(error)
    except BaseException:
        _discard(pending)
        raise
    return tuple(found)


def _discard(pending: Sequence[Pending]) -> None:
    """Close the descriptors of answers that are not used."""
    for one in pending:
        if isinstance(one, PendingOperation) and one.descriptor is not None:
            os.close(one.descriptor)
            one.descriptor = None


def _is_skipped(one: Pending) -> bool:
    if isinstance(one, PendingOperation):
        return one.done.exception() is None and one.done.result() == errno.ECANCELED
    error = one.ended.exception()
    return isinstance(error, CommandRejected) and error.number == errno.ECANCELED


async def _result(action: Action, one: Pending, room: int) -> Result:
    if isinstance(one, PendingCommand):
        assert isinstance(action, Exec)
        return _observation(action, one)
    error = one.done.result()
    match action:
        case Read():
            return await files.read_result(one, action.path, room)
        case Write():
            check(error, action.path)
            return None
        case Edit():
            files.check_edited(one, action.path)
            return None
        case List():
            check(error, action.path)
            return await entries(b"".join(one.data))
        case Search():
            return await search.result(action, one)
        case Exec():
            raise AssertionError("a command has no file operation")


def _observation(action: Exec, running: PendingCommand) -> Observation:
    """Its time begins when init starts it and ends with it, without the other actions of the batch."""
    try:
        ended = running.ended.result()
    except CommandNotStarted as error:
        return not_started(error.message)
    received, sent = ended[2], ended[6]
    seen = observe(action, running, ended, received / 1e9, done=sent / 1e9)
    if len(seen.spans) == 1:
        return seen  # it never ran
    return msgspec.structs.replace(seen, spans=seen.spans[:-1])
