"""Owners of all kinds: threads, forks, event loops, notebooks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading

import anyio
import pytest
import uvloop

import dutyfree
import dutyfree.sync
from dutyfree.contract import Substrate
from tests.engine import counts
from tests.processes import speaking_python


@pytest.mark.native
def test_many_threads_at_once() -> None:
    failures: list[BaseException] = []

    def work(sandbox: object, number: int) -> None:
        try:
            for turn in range(10):
                seen = sandbox.exec(["echo", f"{number} {turn}"])  # type: ignore[attr-defined]
                assert seen.stdout == f"{number} {turn}\n".encode()
                sandbox.write(f"file{number}", str(turn).encode())  # type: ignore[attr-defined]
                assert sandbox.read(f"file{number}") == str(turn).encode()  # type: ignore[attr-defined]
        except BaseException as error:
            failures.append(error)

    with dutyfree.sync.open("native") as substrate, substrate.sandbox() as sandbox:
        threads = [threading.Thread(target=work, args=(sandbox, number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.native
def test_the_blocking_face_has_the_abilities() -> None:
    with dutyfree.sync.open("native") as substrate, substrate.sandbox() as sandbox:
        sandbox.write("file", b"one")
        assert sandbox.batch([dutyfree.Edit("file", b"one", b"two"), dutyfree.Read("file")]) == (None, b"two")
        with sandbox.terminal(["echo", "x"]) as held:
            assert held.read().startswith(b"x")
        process = sandbox.start("cat", stdin=True)
        process.write(b"said")
        process.close_stdin()
        assert [piece.data for piece in process.output()] == [b"said"]
        with sandbox.watch(".") as changes:
            sandbox.write("new", b"")
            assert next(changes).path == "new"
        assert sandbox.search(".", "two").matches[0].path == "file"


FORKING = """
import anyio, dutyfree, os, sys
from dutyfree.contract.errors import SandboxClosed

async def main():
    async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:
        print(substrate.node.launcher.pid, flush=True)
        process = await sandbox.start("cat", stdin=True)
        child = os.fork()
        if child == 0:
            try:
                await sandbox.exec("true")
            except SandboxClosed as error:
                sys.stdout.write(str(error) + "\\n")
                sys.stdout.flush()
                os._exit(0)
            os._exit(1)
        for _ in range(20):
            assert (await sandbox.exec("echo x")).stdout == b"x\\n"
        assert os.waitpid(child, 0)[1] == 0
        await process.write(b"still mine")
        await process.close_stdin()
        assert (await process.wait()).stdout == b"still mine"
        async with substrate.sandbox() as other:
            assert (await other.exec("true")).ok
    print("whole", flush=True)

anyio.run(main)
"""

FORKING_BLOCKING = """
import dutyfree.sync, os, sys
from dutyfree.contract.errors import SandboxClosed

with dutyfree.sync.open("native") as substrate, substrate.sandbox() as sandbox:
    print(substrate._inner.node.launcher.pid, flush=True)
    child = os.fork()
    if child == 0:
        try:
            sandbox.exec("true")
        except SandboxClosed as error:
            print(error, flush=True)
        else:
            os._exit(1)
        sys.exit(0)  # through all contexts
    assert os.waitpid(child, 0)[1] == 0
    assert sandbox.exec("echo x").stdout == b"x\\n"
print("whole", flush=True)
"""


@pytest.mark.native
@pytest.mark.parametrize("program", [FORKING, FORKING_BLOCKING], ids=["async", "blocking"])
def test_a_fork_of_the_owner_is_not_the_owner(program: str) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    launcher, said, whole = done.stdout.splitlines()
    assert "fork" in said
    assert "open a substrate of its own" in said
    assert whole == "whole"
    assert not counts.started(int(launcher))  # it was its child, and has ended


@pytest.mark.native
def test_a_fork_does_not_keep_an_input_open() -> None:
    """A command's input ends when the owner closes it, even if a forked copy of the owner lives on."""
    program = """
    import anyio, dutyfree, os, signal
    async def main():
        children = []
        async def said():
            yield b"said"
            children.append(os.fork())
            if children[0] == 0:
                signal.pause()
        async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:
            heard = b""
            async for item in sandbox.stream("cat", stdin=said(), timeout=60):
                heard += getattr(item, "data", b"")
            os.kill(children[0], signal.SIGKILL)
            os.waitpid(children[0], 0)
            print(heard, item.ok, flush=True)
    anyio.run(main)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "b'said' True\n", done.stderr


@pytest.mark.native
def test_a_fork_does_not_keep_the_launcher_alive() -> None:
    program = """
    import anyio, dutyfree, os, sys, time
    async def main():
        async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:
            async with sandbox.terminal("sleep 100"):
                print(substrate.node.launcher.pid, flush=True)
                if os.fork() == 0:
                    time.sleep(1000)
                    os._exit(0)
                sys.stdin.readline()
                os.kill(os.getpid(), 9)
    anyio.run(main)
    """
    options = {"start_new_session": True, "stdin": subprocess.PIPE}
    with speaking_python(program, **options) as (process, launcher):
        begun = counts.started(int(launcher))
        assert begun
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
        try:
            assert counts.ended(int(launcher), begun)
        finally:
            os.killpg(process.pid, 9)


async def actions(substrate: Substrate) -> None:
    async with substrate.sandbox() as sandbox:
        assert (await sandbox.exec("cat", stdin=b"in")).stdout == b"in"
        results = await sandbox.batch([dutyfree.Write("f", bytes(500_000)), dutyfree.Read("f")])  # type: ignore[attr-defined]
        assert results[1] == bytes(500_000)
        async with sandbox.terminal(["echo", "x"]) as held:  # type: ignore[attr-defined]
            assert (await held.read()).startswith(b"x")
        await sandbox.pause()  # type: ignore[attr-defined]
        await sandbox.resume()  # type: ignore[attr-defined]
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.2):
                await sandbox.exec("sleep 60")
        async with sandbox.watch(".") as changes:  # type: ignore[attr-defined]
            await sandbox.write("g", b"")
            assert (await anext(changes)).path == "g"


@pytest.mark.native
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_event_loops(loop: str) -> None:
    async def main() -> None:
        async with dutyfree.open("native") as substrate:
            await actions(substrate)

    if loop == "uvloop":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    else:
        asyncio.run(main())


@pytest.mark.native
def test_the_blocking_face_inside_a_running_loop() -> None:
    async def main() -> None:
        with dutyfree.sync.open("native") as substrate, substrate.sandbox() as sandbox:
            assert sandbox.exec("echo x").stdout == b"x\n"

    asyncio.run(main())


@pytest.mark.native
@pytest.mark.slow
def test_in_a_notebook() -> None:
    nbclient = pytest.importorskip("nbclient", reason="to enable it: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="to enable it: pip install ipykernel")
    nbformat = pytest.importorskip("nbformat")
    cells = [
        "import dutyfree, dutyfree.sync",
        "substrate = await dutyfree.open('native').__aenter__()",
        "async with substrate.sandbox() as sandbox:\n    print((await sandbox.exec('echo awaited')).stdout)",
        "with dutyfree.sync.open('native') as blocking, blocking.sandbox() as sandbox:\n"
        "    print(sandbox.exec('echo blocked').stdout)",
        "await substrate.__aexit__(None, None, None)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    said = "".join(one["text"] for cell in notebook.cells for one in cell["outputs"] if "text" in one)
    assert said == "b'awaited\\n'\nb'blocked\\n'\n"


@pytest.mark.native
def test_signals_that_an_owner_ignores_are_not_ignored_in_a_sandbox() -> None:
    """As with nohup, or in the background of a script: a shell could not trap ignored signals."""
    program = textwrap.dedent("""
        import signal, dutyfree
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1): signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        with dutyfree.sync.open("native") as substrate, substrate.sandbox() as sandbox:
            print(sandbox.exec("grep -E 'Sig(Blk|Ign)' /proc/self/status").stdout.decode())
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16]
