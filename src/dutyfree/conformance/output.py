"""Output and input: separate streams, any byte, any amount."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread

from dutyfree.conformance import expect
from dutyfree.conformance.suite import in_sandbox, on_substrate
from dutyfree.contract import Cut, Limits, Sandbox, Substrate

EVERY_BYTE = bytes(range(256)) * 16


@in_sandbox("commands")
async def separate_streams(sandbox: Sandbox) -> None:
    """Standard output and standard error are returned separately and completely."""
    seen = await sandbox.exec("for i in 1 2 3; do echo out$i; echo err$i >&2; done; printf end")
    expect.equal(seen.stdout, b"out1\nout2\nout3\nend", "stdout")
    expect.equal(seen.stderr, b"err1\nerr2\nerr3\n", "stderr")
    expect.equal(seen.cut, Cut(), "cut of a short output")


@in_sandbox("commands")
async def binary_output(sandbox: Sandbox) -> None:
    """Every byte value passes, NUL included, on both streams."""
    await sandbox.write("bytes", EVERY_BYTE)
    seen = await sandbox.exec("cat bytes; cat bytes >&2")
    expect.equal(seen.stdout, EVERY_BYTE, "stdout")
    expect.equal(seen.stderr, EVERY_BYTE, "stderr")


@in_sandbox("commands")
async def both_streams_full(sandbox: Sandbox) -> None:
    """Much output on one stream does not block the other stream."""
    seen = await sandbox.exec(
        "head -c 3000000 /dev/zero >&2; head -c 2000000 /dev/zero; head -c 1000000 /dev/zero >&2"
    )
    expect.equal((len(seen.stdout), len(seen.stderr)), (2_000_000, 4_000_000), "bytes of stdout, stderr")


class _Memory:
    """Measures the peak growth of this process's memory, from a thread."""

    def __init__(self) -> None:
        self.grown = 0
        self._before = self._resident()
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="conformance-memory")

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._enough.set()

    def _watch(self) -> None:
        while not self._enough.wait(0.002):
            self.grown = max(self.grown, self._resident() - self._before)

    @staticmethod
    def _resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@in_sandbox("commands", deadline=120)
async def hundred_megabytes(sandbox: Sandbox) -> None:
    """100 MB of output cost bounded memory: head and tail are kept, and the bytes between are counted."""
    memory = await anyio.to_thread.run_sync(_Memory)
    with memory.watched():
        seen = await sandbox.exec("echo begin; head -c 100000000 /dev/zero; echo end")
    expect.succeeded(seen, "100 MB of output")
    expect.equal(len(seen.stdout) + seen.cut.stdout, 100_000_010, "bytes kept and cut")
    expect.that(len(seen.stdout) <= Limits().output, f"{len(seen.stdout)} bytes kept, above the limit")
    expect.that(len(seen.stdout) >= Limits().output // 2, f"only {len(seen.stdout)} bytes kept")
    expect.equal(seen.stdout[:7], b"begin\n\0", "head")
    expect.equal(seen.stdout[-5:], b"\0end\n", "tail")
    expect.that(memory.grown < 80_000_000, f"our memory grew by {memory.grown / 1e6:.0f} MB")


@on_substrate("commands")
async def output_limit(substrate: Substrate) -> None:
    """``Limits(output=)`` bounds each stream: head and tail are kept, and the bytes between are counted."""
    lines = "".join(f"{number:09}\n" for number in range(1000)).encode()
    async with substrate.sandbox(limits=Limits(output=1000)) as sandbox:
        await sandbox.write("lines", lines)
        seen = await sandbox.exec("cat lines; cat lines >&2")
        for name, kept, cut in (
            ("stdout", seen.stdout, seen.cut.stdout),
            ("stderr", seen.stderr, seen.cut.stderr),
        ):
            expect.that(len(kept) <= 1000, f"{len(kept)} bytes of {name} kept, above the limit of 1000")
            expect.equal(len(kept) + cut, len(lines), f"bytes of {name} kept and cut")
            expect.equal((kept[:200], kept[-200:]), (lines[:200], lines[-200:]), f"head and tail of {name}")
        seen = await sandbox.exec("head -c 1000 lines")
        expect.equal((seen.stdout, seen.cut), (lines[:1000], Cut()), "output of exactly the limit")


@in_sandbox("commands")
async def stdin(sandbox: Sandbox) -> None:
    """The command reads its input, any bytes, to the end."""
    seen = await sandbox.exec("cat; echo .", stdin="text: ünï→𝄞\n".encode())
    expect.equal(seen.stdout.decode(), "text: ünï→𝄞\n.\n", "text through cat")
    seen = await sandbox.exec(["cat"], stdin=EVERY_BYTE)
    expect.equal(seen.stdout, EVERY_BYTE, "bytes through cat")


@in_sandbox("commands", deadline=120)
async def stdin_of_ten_megabytes(sandbox: Sandbox) -> None:
    """10 MB pass through a command that writes while it reads."""
    data = random.Random(10).randbytes(10_000_000)  # noqa: S311
    seen = await sandbox.exec(["cat"], stdin=data)
    expect.that(seen.stdout == data, f"{len(seen.stdout)} bytes came back, not the 10,000,000 given")


@in_sandbox("commands", deadline=120)
async def no_stdin_is_empty(sandbox: Sandbox) -> None:
    """Without ``stdin``, or with an empty one, the command reads an empty stream and does not wait."""
    for given in (None, b""):
        seen = await sandbox.exec("cat; wc -c", stdin=given)
        expect.equal(seen.stdout.split(), [b"0"], f"read with stdin={given!r}")


@in_sandbox("commands", deadline=120)
async def unread_stdin(sandbox: Sandbox) -> None:
    """A command that does not read its input, or stops reading, ends normally."""
    data = bytes(5_000_000)
    expect.equal((await sandbox.exec(["true"], stdin=data)).exit_code, 0, "exit code of true")
    seen = await sandbox.exec("head -c 5 >/dev/null; echo done; exit 3", stdin=data)
    expect.equal((seen.exit_code, seen.stdout), (3, b"done\n"), "a command that reads 5 bytes")


@in_sandbox("commands")
async def times(sandbox: Sandbox) -> None:
    """Spans are not negative, lie within the observation's seconds, and ``run`` is the command's own time."""
    seen = await sandbox.exec("sleep 0.2")
    expect.that(seen.seconds >= 0.2, f"sleep 0.2 took {seen.seconds} s")
    for span in seen.spans:
        expect.that(span.start >= 0 and span.seconds >= 0, f"a negative span: {span}")
        ends = span.start + span.seconds
        expect.that(ends <= seen.seconds + 1e-6, f"{span} ends after the observation, {seen.seconds} s")
    own = seen.command_seconds
    expect.that(
        own is None or 0.19 <= own <= seen.seconds, f"run time of sleep 0.2: {own} of {seen.seconds} s"
    )
    if seen.usage is not None:
        used = seen.usage.cpu_seconds  # sleeping is not using, however slow the start
        expect.that(0 <= used < seen.seconds - 0.1, f"CPU time of sleep 0.2: {used} of {seen.seconds} s")
        expect.that(
            seen.usage.peak_memory is None or seen.usage.peak_memory > 0, f"peak memory: {seen.usage}"
        )
