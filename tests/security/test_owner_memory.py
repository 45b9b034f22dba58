"""The owner's memory for a sandbox's output is bounded, whatever the sandbox sends."""

from __future__ import annotations

from dutyfree import Limits
from dutyfree.contract import Substrate
from dutyfree.engine.launcher.protocol import FRAME_COST
from dutyfree.engine.sandbox.processes import SHARED_OUTPUT, OutputBudget, OutputLog
from dutyfree.engine.sandbox.sandbox import NativeSandbox

OUTPUT = 1 << 20


async def test_processes_that_have_ended_keep_little(native: Substrate) -> None:
    """All logs together take at most twice one limit and a MiB; the oldest are dropped first, and say so."""
    size, limits = OUTPUT - 50_000, Limits(output=OUTPUT)
    async with native.sandbox(limits=limits) as sandbox:
        assert isinstance(sandbox, NativeSandbox)
        processes = []
        for _ in range(12):
            processes.append(await sandbox.start(f"head -c {size} /dev/zero"))
            seen = await processes[-1].wait()
            assert (len(seen.stdout), seen.cut.stdout) == (size, 0)
        assert 0 < sandbox._processes.budget.kept <= 2 * OUTPUT + SHARED_OUTPUT
        ended = [await process.wait() for process in processes]
        assert all(len(seen.stdout) + seen.cut.stdout == size for seen in ended)
        assert ended[0].cut.stdout == size, "the oldest"
        assert ended[-1].cut.stdout == 0, "the latest"
        assert all(seen.ok for seen in ended)
        assert [piece async for piece in processes[0].output()] == []


async def test_those_that_run_share_what_there_is(native: Substrate) -> None:
    async with native.sandbox(limits=Limits(output=OUTPUT)) as sandbox:
        assert isinstance(sandbox, NativeSandbox)
        print_all = f"head -c {OUTPUT} /dev/zero; echo all; exec sleep 1000"
        processes = [await sandbox.start(print_all) for _ in range(8)]
        for process in processes:
            async for piece in process.output():
                if piece.data.endswith(b"all\n"):
                    break
        assert 0 < sandbox._processes.budget.kept <= 2 * OUTPUT + SHARED_OUTPUT
        for process in processes:
            await process.kill()
            seen = await process.wait()
            assert len(seen.stdout) + seen.cut.stdout == OUTPUT + 4
            assert seen.stdout.endswith(b"all\n")


async def test_bytes_that_come_one_by_one() -> None:
    """A frame costs more than its byte."""
    shelf = OutputBudget()
    logs = [OutputLog(OUTPUT, shelf) for _ in range(4)]
    for number in range(100_000):
        logs[number % 4].add("stdout" if number % 8 < 4 else "stderr", b"x")
    assert shelf.kept == sum(log.kept for log in logs) <= 2 * OUTPUT + SHARED_OUTPUT
    assert sum(len(log.following(0)) for log in logs) * FRAME_COST <= shelf.kept
    for log in logs:
        (out, out_cut), (err, err_cut) = log.of("stdout"), log.of("stderr")
        assert len(out) + out_cut + len(err) + err_cut == 25_000
        assert out


STEALING = """
printf() {{
    command printf '\\n%s ' "$2"
    head -c {size} /dev/zero | tr '\\0' 9
    unset -f printf
    printf "$@"
}}
false
"""


async def test_a_shell_whose_mark_was_found_out(native: Substrate) -> None:
    """A command that imitates the shell's end mark without a code: that is plain output."""
    async with native.sandbox(limits=Limits(output=OUTPUT)) as sandbox:
        assert isinstance(sandbox, NativeSandbox)
        async with sandbox.shell() as shell:
            seen = await shell.run(STEALING.format(size=8 * OUTPUT), timeout=60)
            assert (seen.exit_code, seen.timed_out) == (1, False)
            assert len(seen.stdout) <= OUTPUT < seen.cut.stdout
            assert seen.stdout.endswith(b"999")
            assert (await shell.run("echo on", timeout=60)).stdout == b"on\n"
            assert not any(len(stream.kept.value()) for stream in shell._streams), "nothing is kept"
