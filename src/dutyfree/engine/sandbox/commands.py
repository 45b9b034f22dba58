"""One sandbox of the engine, under the contract: actions on the wire, and what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import posixpath
import signal
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from time import perf_counter

import anyio
import anyio.to_thread
from anyio.abc import SocketStream

from dutyfree.contract import (
    Command,
    Entry,
    Limits,
    Observation,
    Span,
)
from dutyfree.contract.abilities import Chunk
from dutyfree.contract.arguments import (
    EMPTY,
    NOT_FOUND,
    NUL,
    TOO_LONG,
    UNENCODABLE,
    Unrunnable,
    check_bytes,
    check_command,
    check_mode,
    encoded_path,
    not_started,
)
from dutyfree.contract.entries import Links
from dutyfree.contract.errors import (
    DispatchError,
    ExecError,
    SandboxClosed,
    SubstrateError,
    UsageError,
    file_error,
)
from dutyfree.contract.served import Served
from dutyfree.engine.launcher import network_policy, protocol
from dutyfree.engine.launcher.handle import SandboxHandle
from dutyfree.engine.launcher.network import SandboxNetwork
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.layers.command_defaults import WORKDIR, CommandDefaults
from dutyfree.engine.sandbox import contents, feeding, transfer
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.observation import check, entries, observe
from dutyfree.engine.sandbox.pending import Running, Unstarted
from dutyfree.engine.sandbox.shell import NativeShell

TAIL = 256 << 10
"""At most so much of an output's tail is kept: init holds it in the sandbox's own memory."""

CREDIT = 1 << 20
"""So much of a streamed output may be under way."""

_STRINGS_MAX = protocol.FRAME_MAX - 256  # of a command: more than the kernel takes
_PATH_MAX = 1 << 16  # likewise

Remake = Callable[[], Awaitable[tuple[Channel, SandboxHandle]]]


class CommandSandbox:
    """Commands, files and abilities. Made by the substrate, which gives it the way to its init."""

    def __init__(
        self,
        identity: str,
        limits: Limits,
        usual: CommandDefaults,
        remake: Remake,
        channel: Channel,
        box: SandboxHandle,
        reach: SandboxNetwork,
        resolvers: Sequence[network_policy.Resolver],
    ) -> None:
        self.id = identity
        self.workdir = usual.directory or WORKDIR
        self.program = usual.program
        """What the image would run by itself; nothing does, unless it is handed to ``exec``."""
        self._usual = usual
        self.spans: tuple[Span, ...] = ()
        self.keep_output(limits.output)
        self._born_closed = limits.network in (None, "off")
        self._remake = remake
        self._channel = channel
        self._box = box
        self._reach = reach
        self._resolvers = resolvers
        self._closed = False
        self._ended = False
        self._paused: float | None = None
        self.served: Served | None = None
        """How it was handed out, at what cost, and what that would have been with nothing at hand."""
        self.staged: tuple[tuple[str, float], ...] = ()
        """Stages that were run for it alone: their kinds, and the seconds that they took."""

    def __repr__(self) -> str:
        state = "closed" if self._closed else "dead" if not self.alive else "paused" if self._paused else ""
        return f"<sandbox {self.id}{', ' if state else ''}{state}>"

    @property
    def alive(self) -> bool:
        """Whether nothing is known against it."""
        return not self._closed and not self._channel.closed

    def on_death(self, tell: Callable[[], None]) -> None:
        """Have it told when the sandbox ends by itself, until its first reset."""
        self._channel.on_death = tell

    def keep_output(self, most: int) -> None:
        """At most so many bytes of each stream, from now on."""
        self._tail = min(most // 2, TAIL)
        self._head = most - self._tail

    # --- Commands -----------------------------------------------------------------------------------

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> Observation:
        asked = perf_counter()
        check_command(command, cwd=cwd, env=env, stdin=stdin, timeout=timeout, user=user)
        channel = self._usable()
        try:
            payload = self._payload(command, cwd, env, timeout, user)
        except Unrunnable as error:
            return error.observation
        given = None if stdin is None else await contents.memory_file(stdin)
        identity, running = channel.exec(payload, given, timeout)
        try:
            ended = await running.ended
        except asyncio.CancelledError:
            await _kill(channel, identity, running)
            raise
        except Unstarted as error:
            return not_started(error.message, seconds=perf_counter() - asked)
        return observe(command, user or self._usual.user, cwd, running, ended, asked)

    async def stream(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | AsyncIterable[bytes] | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> AsyncIterator[Chunk | Observation]:
        asked = perf_counter()
        fed = isinstance(stdin, AsyncIterable)
        check_command(command, cwd=cwd, env=env, stdin=None if fed else stdin, timeout=timeout, user=user)
        channel = self._usable()
        arrived: asyncio.Queue[Chunk | None] = asyncio.Queue()
        try:
            payload = self._payload(command, cwd, env, timeout, user, protocol.EXEC_STREAM)
        except Unrunnable as error:
            yield error.observation
            return
        given: AbstractAsyncContextManager[int | None]
        if isinstance(stdin, AsyncIterable):
            given = feeding.fed(stdin)
        else:
            given = contextlib.nullcontext(None if stdin is None else await contents.memory_file(stdin))
        async with given as descriptor:
            identity, running = channel.exec(payload, descriptor, timeout)
            running.on_output = lambda stream, data: arrived.put_nowait(
                Chunk("stdout" if stream == 1 else "stderr", data)
            )
            running.ended.add_done_callback(lambda _: arrived.put_nowait(None))
            try:
                while (chunk := await arrived.get()) is not None:
                    yield chunk
                    channel.credit(identity, len(chunk.data) + protocol.FRAME_COST)
            finally:
                if not running.ended.done():
                    await _kill(channel, identity, running)
        yield observe(command, user or self._usual.user, cwd, running, running.ended.result(), asked)

    @asynccontextmanager
    async def shell(self) -> AsyncIterator[NativeShell]:
        channel = self._usable()
        payload = self._payload(["/bin/sh"], None, None, None, None, protocol.EXEC_STREAM)
        held = NativeShell(channel, payload, self.write, self.remove, self._head + self._tail)
        try:
            yield held
        finally:
            await held.close()

    def _payload(
        self,
        command: Command,
        cwd: str | None,
        env: Mapping[str, str] | None,
        timeout: float | None,
        user: str | None,
        flags: int = 0,
    ) -> bytes:
        """Raises Unrunnable."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [*command]
        if not argv:
            raise Unrunnable(EMPTY, NOT_FOUND)
        usual = self._usual
        count, variables = len(usual.environment), usual.packed
        if usual.directory:
            cwd = posixpath.join(usual.directory, cwd or "")
        try:
            words = [user or usual.user, cwd or "", *argv]
            if env:
                merged = [f"{name}={value}" for name, value in {**usual.environment, **env}.items()]
                count, variables = len(merged), b""
                words += merged
            strings = os.fsencode("\0".join(words)) + b"\0" + variables
        except UnicodeEncodeError:
            raise Unrunnable(UNENCODABLE) from None
        if strings.count(b"\0") != 2 + len(argv) + count:
            raise Unrunnable(NUL)
        if len(strings) > _STRINGS_MAX:
            raise Unrunnable(TOO_LONG)
        nanoseconds = 0 if timeout is None else max(1, int(min(protocol.FOREVER, timeout) * 1e9))
        head, tail = (CREDIT, 0) if flags else (self._head, self._tail)
        return protocol.EXEC.pack(nanoseconds, head, tail, flags, len(argv), count) + strings

    # --- Files --------------------------------------------------------------------------------------

    async def read(self, path: str) -> bytes:
        answer = await self._usable().ask(Frame.READ, self._path(path))
        check(answer.done.result(), path)
        if answer.descriptor is None:
            return answer.data[0]
        return await contents.read_whole(answer.descriptor, path)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        channel = self._usable()
        check_mode(mode)
        check_bytes(data)
        payload = protocol.WRITE.pack(mode) + self._path(path)
        if len(data) <= protocol.INLINE_MAX:
            answer = await channel.ask(Frame.WRITE, payload + data)
        else:
            source = await contents.memory_file(data)
            answer = await channel.ask(Frame.WRITE, payload, source)
        check(answer.done.result(), path)

    async def list(self, path: str) -> tuple[Entry, ...]:
        answer = await self._usable().ask(Frame.LIST, self._path(path))
        check(answer.done.result(), path)
        return await entries(b"".join(answer.data))

    async def remove(self, path: str) -> None:
        answer = await self._usable().ask(Frame.REMOVE, self._path(path))
        check(answer.done.result(), path)

    async def upload(self, source: Path, path: str) -> None:
        await transfer.upload(self._usable(), Path(source), self._path(path), path)

    async def download(self, path: str, target: Path, *, outside_links: bool = False) -> tuple[str, ...]:
        links = Links(path, outside=outside_links)
        await transfer.download(self._usable(), self._path(path), path, Path(target), links)
        return tuple(links.left_out)

    # --- Abilities ----------------------------------------------------------------------------------

    async def reset(self) -> None:
        """A fresh sandbox takes the place of the used one, of which nothing is kept.

        The old one is killed first, and goes while the new one comes. Raises CreateError, which leaves
        the sandbox of no use.
        """
        self._usable().abandon()
        self._channel, self._box = await self._remake()

    async def verify(self) -> None:
        """See that it is as it was before its first command. Raises ExecError, saying what is left."""
        closed = protocol.NUMBER.pack(self._born_closed and not self._reach.policy)
        answer = await self._usable().ask(Frame.VERIFY, closed, timeout=0.0)
        _, left = await self._box.audit()
        if answer.done.result():
            said = b"".join(answer.data)[:1000].decode(errors="replace") or os.strerror(answer.done.result())
            left = f"{said}, {left}" if left else said
        if left:
            raise ExecError(f"sandbox {self.id} is not as new: {left}")

    def give_way(self, yes: bool) -> None:
        """Whether what runs in it gives way to all other work."""
        self._usable().tell(Frame.BACKGROUND, 0, protocol.NUMBER.pack(yes))

    async def connect(self, port: int) -> SocketStream:
        if not 0 < port < 65536:
            raise UsageError(f"there is no port {port}")
        with self._launcher_request():
            return await self._reach.connect(port)

    async def pause(self) -> None:
        """Freeze all processes, init too; by signals, which they can see, where the host cannot freeze."""
        with self._launcher_request() as channel:
            self._paused = perf_counter()
            try:
                await self._stand_still(channel)
            except BaseException:
                if not self._closed:
                    await self._resume()
                raise

    async def resume(self) -> None:
        await self._resume()

    async def _resume(self) -> None:
        if self._paused is None or self._closed:
            self._usable()
            return
        try:
            await self._go_on(self._channel, self._paused)
        finally:
            self._paused = None

    async def _stand_still(self, channel: Channel) -> None:
        """If it fails, some do: ``_go_on`` then too."""
        channel.hold()
        if not self._box.freezer:
            await self._signal(channel, signal.SIGSTOP)
        await self._box.freeze()

    async def _go_on(self, channel: Channel, since: float) -> None:
        # Heard before init looks at any deadline.
        pause = int((perf_counter() - since) * 1e9)
        channel.tell(Frame.POSTPONE, 0, protocol.NANOSECONDS.pack(pause))
        self._box.thaw()
        if not self._box.freezer:
            with anyio.CancelScope(shield=True):
                await self._signal(channel, signal.SIGCONT)
        channel.release()

    async def _signal(self, channel: Channel, number: signal.Signals) -> None:
        answer = await channel.ask(Frame.SIGNAL_ALL, protocol.NUMBER.pack(number), timeout=0.0)
        check(answer.done.result(), "/")

    # --- The end ------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """It is of no use from now on, and ends by itself; ``close`` waits for that."""
        if not self._closed:
            self._closed = True
            self._channel.close()

    async def close(self) -> None:
        if self._ended:
            return
        self._closed = self._ended = True
        self._channel.close()
        with anyio.CancelScope(shield=True):
            await self._box.destroy()

    def _path(self, path: str) -> bytes:
        """As init takes it. Raises ArgumentError, RequestError, FileError."""
        encoded = encoded_path(path)
        if self._usual.directory:
            encoded = posixpath.join(os.fsencode(self._usual.directory), encoded)
        if len(encoded) > _PATH_MAX:
            raise file_error(errno.ENAMETOOLONG, f"{path[:100]}…")
        return (encoded or b".") + b"\0"

    def _usable(self) -> Channel:
        if self._closed:
            raise SandboxClosed(f"sandbox {self.id} is closed")
        if self._paused is not None:
            raise DispatchError(f"sandbox {self.id} is paused", remedy="resume it first")
        return self._channel

    @contextmanager
    def _launcher_request(self) -> Iterator[Channel]:
        """Around what is asked of the launcher. If the sandbox has ended, that is why the request fails.

        Raises SandboxGone, SandboxClosed.
        """
        channel = self._usable()
        channel.check()
        try:
            yield channel
        except SubstrateError:
            channel.check()
            raise


async def _kill(channel: Channel, identity: int, running: Running) -> None:
    """Kill a command's tree, and come back when it is dead."""
    if running.ended.done() and not running.ended.cancelled():
        return
    if channel.held:  # it stands still, and is killed before it goes on
        channel.kill(identity)
        return
    running.ended = asyncio.get_running_loop().create_future()
    if not channel.kill(identity):  # it ended between the cancellation and now
        return
    with anyio.CancelScope(shield=True):
        await asyncio.wait([running.ended])
        running.ended.exception()
