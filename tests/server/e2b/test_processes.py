"""Commands as E2B knows them: what a reader gets that is slower than the command."""

from __future__ import annotations

import anyio

from dutyfree.server.e2b.processes import TERMINAL_KEPT, CommandConfig, TerminalCommand
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
