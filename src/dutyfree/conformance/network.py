"""The network: the policy of a sandbox, changes of it, and ports of servers in the sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
from anyio.abc import SocketAttribute, SocketStream

from dutyfree.conformance import expect
from dutyfree.conformance.suite import Skipped, in_sandbox, on_substrate, require
from dutyfree.contract import NetworkPolicy, Sandbox, Substrate
from dutyfree.contract.abilities import NetworkControl, Ports
from dutyfree.contract.errors import UsageError

_REACH = (
    "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)\n"
    "print(s.recv(9).decode())"
)
_HOLD = (
    "import socket, sys, time; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20); s.recv(9)\n"
    "open('held', 'w').close(); s.settimeout(60)\n"
    "try: print('ended' if not s.recv(1) else 'data')\nexcept OSError as e: print('ended')"
)
_SERVE = (
    "import socket; s = socket.create_server(('127.0.0.1', 8123)); open('up', 'w').close()\n"
    "while True:\n c, _ = s.accept()\n while d := c.recv(99): c.sendall(d.upper())\n c.close()"
)


@asynccontextmanager
async def _greeter() -> AsyncIterator[int]:
    """Run a server on this host that greets and keeps its connections. Yields its port."""

    async def greet(stream: SocketStream) -> None:
        async with stream:
            await stream.send(b"greetings")
            await anyio.sleep_forever()

    # On every address, because substrates reach this host at different ones.
    listener = await anyio.create_tcp_listener(local_host="0.0.0.0")  # noqa: S104
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, greet)
        yield listener.extra(SocketAttribute.local_port)  # noqa: S610
        tasks.cancel_scope.cancel()


@on_substrate("python", deadline=120)
async def network_changes(substrate: Substrate) -> None:
    """The network policy can change at any time; a stricter policy cuts open connections."""
    address = substrate.host_address
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(substrate.sandbox())
        if not isinstance(sandbox, NetworkControl) or address is None:
            raise Skipped("not NetworkControl")
        port = await stack.enter_async_context(_greeter())
        policies: list[tuple[NetworkPolicy, bool]] = [
            ("off", False),
            ("on", True),
            ((f"host:{port}",), True),
            ((f"host:{port % 65535 + 1}", "192.0.2.0/24"), False),
            ("on", True),
        ]
        for policy, open_ in policies:
            await sandbox.set_network(policy)
            seen = await sandbox.exec(["python3", "-c", _REACH, address, str(port)], timeout=60)
            expect.equal(seen.stdout == b"greetings\n", open_, f"reaching this host under {policy}")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_held, sandbox, address, port)
            await sandbox.exec("until [ -e held ]; do sleep 0.02; done")
            await sandbox.set_network("off")


async def _held(sandbox: Sandbox, address: str, port: int) -> None:
    with expect.within(100, "cutting a connection"):
        seen = await sandbox.exec(["python3", "-c", _HOLD, address, str(port)], timeout=60)
    expect.equal(seen.stdout, b"ended\n", "a connection whose network was closed")


@in_sandbox()
async def network_nonsense(sandbox: Sandbox) -> None:
    """A policy that is not valid raises UsageError."""
    if not isinstance(sandbox, NetworkControl):
        raise Skipped("not NetworkControl")
    for nonsense in ("open", ()):
        try:
            await sandbox.set_network(nonsense)  # type: ignore[arg-type]  # on purpose
        except UsageError as error:
            expect.that(str(error), "refused without a reason")
        else:
            raise AssertionError(f"{nonsense!r} was accepted as a policy")


@in_sandbox()
async def ports_refuse(sandbox: Sandbox) -> None:
    """A connection to a port on which no process listens is refused."""
    if not isinstance(sandbox, Ports):
        raise Skipped("not Ports")
    try:
        await sandbox.connect(8124)
    except ConnectionRefusedError:
        return
    raise AssertionError("connected to a port on which no process listens")


@in_sandbox(deadline=120)
async def ports(sandbox: Sandbox) -> None:
    """A server in the sandbox can be reached from outside, by several clients, also without network."""
    if not isinstance(sandbox, Ports):
        raise Skipped("not Ports")
    await require(sandbox, "python")
    await sandbox.exec(["sh", "-c", 'python3 -c "$0" >/dev/null 2>&1 &', _SERVE])
    await sandbox.exec("until [ -e up ]; do sleep 0.02; done")
    for _ in range(3):
        async with await sandbox.connect(8123) as stream:
            await stream.send(b"hello")
            expect.equal(await stream.receive(), b"HELLO", "what the server answered")
            await stream.send_eof()
            with suppress(anyio.EndOfStream):
                expect.that(not await stream.receive(), "more than the answer")
