"""How long the owner waits for an init that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import anyio
import pytest

from dutyfree import errors
from dutyfree.contract import Substrate
from dutyfree.contract.errors import DispatchError, DutyfreeError, ExecError
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.lifecycle import Lifecycle
from tests.awaiting import together
from tests.engine import virtual


@contextlib.contextmanager
def connected() -> Iterator[tuple[Channel, socket.socket, list[str]]]:
    ours, theirs = socket.socketpair()
    destroyed: list[str] = []
    made = Channel(ours, "test", lambda: destroyed.append("test"))
    try:
        yield made, theirs, destroyed
    finally:
        made.close()
        theirs.close()


@contextlib.asynccontextmanager
async def speaking(owner: Channel, init: socket.socket) -> AsyncIterator[None]:
    other, _ = owner.exec(b"")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(speak, init, other)
        yield
        tasks.cancel_scope.cancel()


async def speak(init: socket.socket, other: int) -> None:
    """Send output of another command, as an init that works, until the channel is closed."""
    with contextlib.suppress(BrokenPipeError):
        while True:
            init.send(protocol.frame(Frame.OUTPUT, other, b"x", 1))
            await anyio.sleep(0.5)


@pytest.mark.parametrize(("responds", "verdict"), [(True, "task"), (False, "infrastructure")])
def test_the_verdict_on_an_init_that_does_not_answer(responds: bool, verdict: str) -> None:
    """If the launcher answers, this machine works, so processes in the sandbox are the cause."""

    async def main() -> None:
        async def launcher() -> bool:
            return responds

        ours, theirs = socket.socketpair()
        with theirs:
            owner = Channel(ours, "test", lambda: None, launcher)
            identity, running = owner.exec(b"")
            owner.kill(identity)
            with pytest.raises(DutyfreeError, match="stopped answering") as first:
                await running.ended
            with pytest.raises(DutyfreeError) as later:
                owner.exec(b"")
            assert [errors.verdict(one.value) for one in (first, later)] == [verdict, verdict]

    virtual.run(main)


def test_a_silent_init_is_given_up() -> None:
    async def main() -> None:
        with connected() as (owner, _, destroyed):
            identity, running = owner.exec(b"")
            owner.kill(identity)
            begun = anyio.current_time()
            with pytest.raises(ExecError, match="stopped answering"):
                await running.ended
            assert anyio.current_time() - begun == pytest.approx(owner.answer_timeout)
            assert destroyed == ["test"]

    virtual.run(main)


def test_a_slow_init_is_waited_for() -> None:
    async def main() -> None:
        with connected() as (owner, init, destroyed):
            identity, running = owner.exec(b"")
            owner.kill(identity)
            async with speaking(owner, init):
                await anyio.sleep(3 * owner.answer_timeout)
                init.send(protocol.frame(Frame.EXIT, identity, bytes(protocol.EXIT.size)))
                await running.ended
            assert not destroyed

    virtual.run(main)


def test_an_init_that_answers_everything_else_is_given_up_too() -> None:
    async def main() -> None:
        with connected() as (owner, init, destroyed):
            identity, running = owner.exec(b"")
            owner.kill(identity)
            async with speaking(owner, init):
                with pytest.raises(ExecError, match="stopped answering"):
                    await running.ended
            assert destroyed == ["test"]

    virtual.run(main)


class SlowControl:
    """Takes a second to freeze a sandbox, and another one to thaw it."""

    freezer = True

    def __init__(self) -> None:
        self.frozen = False
        self.fails = False

    async def freeze(self) -> None:
        self.frozen = True
        await anyio.sleep(1)

    async def thaw(self) -> None:
        await anyio.sleep(1)
        if self.fails:
            raise ExecError("it does not thaw")
        self.frozen = False

    async def destroy(self) -> None:
        pass


async def cancel_by_scope(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with anyio.move_on_after(0.5):
        await work()


async def cancel_by_task(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """As ``asyncio.timeout`` does, which no shield of anyio holds back; and again a moment later."""
    task = asyncio.create_task(work())
    for _ in range(2):
        await anyio.sleep(0.3)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("cancel", [cancel_by_scope, cancel_by_task])
def test_a_cancelled_pause_or_resume_leaves_nothing_frozen(
    cancel: Callable[[Callable[[], Coroutine[Any, Any, None]]], Coroutine[Any, Any, None]],
) -> None:
    async def main() -> None:
        with connected() as (owner, _, _):
            control = SlowControl()
            lifecycle = Lifecycle("test", owner, control)

            def states() -> tuple[bool, bool, bool]:
                return control.frozen, owner.frozen, lifecycle.paused

            await cancel(lifecycle.pause)
            assert states() == (False, False, False)
            await lifecycle.pause()
            assert states() == (True, True, True)
            await cancel(lifecycle.resume)
            assert states() == (False, False, False)

    virtual.run(main)


def test_a_cancelled_resumption_that_fails_can_be_repeated() -> None:
    async def main() -> None:
        with connected() as (owner, _, _):
            control = SlowControl()
            lifecycle = Lifecycle("test", owner, control)
            await lifecycle.pause()
            control.fails = True
            await cancel_by_task(lifecycle.resume)
            assert lifecycle.paused
            control.fails = False
            await lifecycle.resume()
            assert not lifecycle.paused

    virtual.run(main)


def test_a_resumption_that_fails_can_be_repeated() -> None:
    async def main() -> None:
        with connected() as (owner, _, _):
            control = SlowControl()
            lifecycle = Lifecycle("test", owner, control)
            await lifecycle.pause()
            control.fails = True
            with pytest.raises(ExecError, match="does not thaw"):
                await lifecycle.resume()
            assert lifecycle.paused
            with pytest.raises(DispatchError, match="is paused"):
                lifecycle.channel()
            control.fails = False
            await lifecycle.resume()
            assert lifecycle.channel() is owner
            assert not owner.frozen

    virtual.run(main)


async def test_a_burst_of_commands_is_heard_in_turns(native: Substrate) -> None:
    """More commands than init starts in one turn, and than its buffer holds: none is lost or mixed up."""
    told: list[int] = []

    async with native.sandbox() as sandbox:

        async def one(number: int) -> None:
            said = f"{number} ".encode() * 100
            seen = await sandbox.exec("cat; echo $PADDING | wc -c", stdin=said, env={"PADDING": "x" * 1000})
            assert seen.stdout == said + b"1001\n"
            told.append(number)

        await together(*(partial(one, number) for number in range(150)))
        assert sorted(told) == list(range(150))
        assert (await sandbox.exec("echo usable")).stdout == b"usable\n"
