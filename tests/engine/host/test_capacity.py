"""At a limit of the host, the error names the limit and the remedy; existing sandboxes go on."""

from __future__ import annotations

import errno
import sys
import textwrap

import pytest

from dutyfree.engine.host import capacity
from tests.processes import ran

GREEDY = textwrap.dedent(
    """
    import contextlib, sys
    import anyio, dutyfree
    from dutyfree.contract.errors import CreateError
    async def main():
        async with dutyfree.open("native") as substrate, contextlib.AsyncExitStack() as stack:
            made = []
            try:
                for _ in range(500):
                    made.append(await stack.enter_async_context(substrate.sandbox()))
            except CreateError as error:
                print(error)
            await made.pop().close()
            for sandbox in made:
                assert (await sandbox.exec(["/bin/true"])).ok
            assert len(made) > 5
        async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:
            assert (await sandbox.exec(["/bin/true"])).ok
    anyio.run(main)
    """
)


@pytest.mark.native
@pytest.mark.parametrize("limit", ["64:4096", "128:128"])
def test_too_many_open_files(limit: str) -> None:
    """The limit of the owner, which it may raise itself; and the hard limit of owner and launcher."""
    done = ran(["prlimit", f"--nofile={limit}", sys.executable, "-c", GREEDY])
    assert done.returncode == 0, done.stderr
    assert "open files" in done.stdout
    assert "ulimit" in done.stdout


POOLED = textwrap.dedent(
    """
    import anyio, dutyfree
    from dutyfree import Recipe, Stage
    async def main():
        async with dutyfree.open("native") as substrate:
            await substrate.pooled()
            for number in range(120):
                recipe = Recipe(stages=(Stage("setup", (f"echo {number}",)),))
                async with substrate.sandbox(recipe) as sandbox:
                    assert (await sandbox.exec(["/bin/true"])).ok
            print(substrate.pool)
    anyio.run(main)
    """
)


@pytest.mark.native
def test_what_is_kept_idle_leaves_open_files_for_who_asks() -> None:
    done = ran(["prlimit", "--nofile=256:256", sys.executable, "-c", POOLED])
    assert done.returncode == 0, done.stderr
    assert "could not" not in done.stderr, "refills neither"
    assert "of 24 sandboxes" in done.stdout


@pytest.mark.parametrize(
    ("number", "word"),
    [
        (errno.EMFILE, "ulimit -Hn"),
        (errno.ENOSPC, "user.max_"),
        (errno.EAGAIN, "kernel.pid_max"),
        (errno.ENOMEM, "memory"),
    ],
)
def test_every_limit_has_a_remedy(number: int, word: str) -> None:
    assert word in capacity.remedy(number)
    assert not capacity.remedy(errno.EPERM)
