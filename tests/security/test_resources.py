"""What the kernel counts for all of the host: no sandbox uses it up for others."""

from __future__ import annotations

import textwrap

import pytest

from dutyfree import Limits
from dutyfree.contract import Sandbox, Substrate

pytestmark = pytest.mark.anyio

LIMITS = Limits(memory=256 << 20, pids=64)


async def python(sandbox: Sandbox, script: str) -> str:
    prelude = "import ctypes, errno, os, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    seen = await sandbox.exec(["python3", "-c", prelude + textwrap.dedent(script)], timeout=20)
    assert seen.ok, seen.stderr.decode()
    return seen.stdout.decode().strip()


async def test_what_is_counted_by_user(native: Substrate) -> None:
    async with native.sandbox(limits=LIMITS) as one, native.sandbox(limits=LIMITS) as other:
        script = """
        made = 0
        while libc.inotify_init() >= 0: made += 1
        if os.fork() == 0:
            os.setsid()
            for fd in (0, 1, 2): os.close(fd)
            time.sleep(30)
        print(made)
        """
        assert int(await python(one, script)) > 8
        assert int(await python(other, script)) > 8
