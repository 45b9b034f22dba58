"""Limits: enforced, or refused at the creation, but never ignored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dutyfree.conformance import expect
from dutyfree.conformance.suite import on_substrate, require
from dutyfree.contract import Limits, Sandbox, Substrate
from dutyfree.contract.errors import CreateError


@asynccontextmanager
async def limited(substrate: Substrate, limits: Limits) -> AsyncIterator[Sandbox | None]:
    """A sandbox with the limits; None if the substrate refuses them, which is allowed."""
    async with AsyncExitStack() as stack:
        sandbox: Sandbox | None = None
        try:
            sandbox = await stack.enter_async_context(substrate.sandbox(limits=limits))
        except CreateError as refused:
            expect.that(str(refused), "refused without a reason")
        yield sandbox


@on_substrate("python")
async def memory(substrate: Substrate) -> None:
    """With 64 MB, a command that needs 512 MB fails; or the limit is refused."""
    async with limited(substrate, Limits(memory=64 << 20)) as sandbox:
        if sandbox is not None:
            seen = await sandbox.exec(["python3", "-c", "print(len(b'x' * (512 << 20)))"], timeout=60)
            expect.that(not seen.ok, "512 MB were had under a limit of 64 MB")
            expect.succeeded(await sandbox.exec("true"), "the next command")


@on_substrate("commands")
async def pids(substrate: Substrate) -> None:
    """With a limit of 40 processes, 200 cannot start; or the limit is refused."""
    async with limited(substrate, Limits(pids=40)) as sandbox:
        if sandbox is not None:
            started = "i=0; while [ $i -lt 200 ]; do sleep 20 & i=$((i + 1)); done; wait; echo all"
            seen = await sandbox.exec(started, timeout=60)
            expect.that(b"all" not in seen.stdout or seen.stderr, "200 processes under a limit of 40")


@on_substrate("commands")
async def disk(substrate: Substrate) -> None:
    """With 16 MB of disk, 64 MB cannot be written; or the limit is refused."""
    async with limited(substrate, Limits(disk=16 << 20)) as sandbox:
        if sandbox is not None:
            seen = await sandbox.exec("head -c 67108864 /dev/zero > file", timeout=60)
            expect.that(not seen.ok, "64 MB were written under a limit of 16 MB")


@on_substrate("python")
async def cpus(substrate: Substrate) -> None:
    """With a quarter of a CPU, a second of work takes longer than a second; or the limit is refused."""
    work = "import time; t, c = time.time(), time.process_time()\n"
    work += "while time.process_time() - c < 0.5: pass\nprint(time.time() - t)"
    async with limited(substrate, Limits(cpus=0.25)) as sandbox:
        if sandbox is not None:
            seen = await sandbox.exec(["python3", "-c", work], timeout=60)
            expect.that(
                float(seen.stdout) > 1.2, f"0.5 s of CPU time in {float(seen.stdout):.2f} s at 0.25 CPUs"
            )


@on_substrate("commands")
async def network_off(substrate: Substrate) -> None:
    """Without network nothing outside can be reached; or the limit is refused."""
    reach = "import socket; socket.socket(type=socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
    async with limited(substrate, Limits(network="off")) as sandbox:
        if sandbox is not None:
            await require(sandbox, "python")
            seen = await sandbox.exec(["python3", "-c", reach])
            expect.that(not seen.ok, "there is a way to 192.0.2.1 with the network off")
