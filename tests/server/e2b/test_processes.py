"""Commands as E2B knows them: their pids, and what a reader gets that is slower than the command."""

from __future__ import annotations

import asyncio
from functools import partial

import anyio
import pytest

from dutyfree.server.e2b.processes import TERMINAL_KEPT, CommandConfig, Commands, TerminalCommand
from dutyfree.substrates.native import Native
from tests.awaiting import until


async def test_a_slow_reader_of_a_terminal_gets_the_latest_output(native: Native) -> None:
    numbered = f"echo begin; read go; seq 1000000 {1000000 + TERMINAL_KEPT // 3}; echo end"
    config = CommandConfig(("/bin/sh", "-c", numbered), {}, None, None, None)
    async with native.sandbox() as sandbox:
        command = TerminalCommand(1, config, sandbox, 24, 80)
        await command.opened()
        output = command.output()
        with anyio.fail_after(60):
            _, piece = await anext(output)
            assert piece.startswith(b"begin")
            await command.write(b"\n")
            await until(lambda: not command.running)
            rest = b"".join([piece async for _, piece in output])
        assert command._dropped
        lines = rest.split(b"\r\n")
        assert lines[-2:] == [b"end", b""]
        numbers = [int(line) for line in lines[1:-2]]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert len(rest) > TERMINAL_KEPT // 4


async def test_what_the_loader_says_on_stderr_is_no_pid(native: Native) -> None:
    """It comes before the pid, and belongs to the command."""
    words = ("/bin/sh", "-c", "echo $$; echo error >&2")
    config = CommandConfig(words, {"LD_PRELOAD": "/nonexistent.so"}, None, None, None)
    async with native.sandbox() as sandbox:
        command = await Commands(sandbox).start(config, stdin=False)
        found = {"stdout": b"", "stderr": b""}
        async for stream, data in command.output():
            found[stream] += data
        assert found["stdout"] == f"{command.pid}\n".encode()
        assert b"/nonexistent.so" in found["stderr"]
        assert found["stderr"].endswith(b"error\n")


async def test_a_command_whose_pid_does_not_come_is_ended(native: Native) -> None:
    config = CommandConfig(("sleep", "1000"), {}, None, None, None)
    async with native.sandbox() as sandbox:
        starting = asyncio.create_task(Commands(sandbox).start(config, stdin=False))
        (process,) = await until(sandbox.processes, partial(asyncio.sleep, 0))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert not process.running
