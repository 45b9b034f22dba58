"""What init holds for its own work is of no use to anybody else."""

from __future__ import annotations

import pytest

from dutyfree import Limits
from dutyfree.contract import Substrate

pytestmark = pytest.mark.anyio

REFUSED = (FileNotFoundError, NotADirectoryError, PermissionError)


async def test_no_descriptor_of_init_leads_out(native: Substrate) -> None:
    """File actions are done by init itself, for which /proc/self/fd is its own."""
    async with native.sandbox() as sandbox:
        for number in range(3, 20):
            for below in (".", "..", "../..", "cgroup.procs", "../cgroup.procs"):
                path = f"/proc/self/fd/{number}/{below}"
                with pytest.raises(REFUSED):
                    await sandbox.list(path)
                with pytest.raises(REFUSED):
                    await sandbox.read(path)
                with pytest.raises(REFUSED):
                    await sandbox.write(path, b"0")
                with pytest.raises(REFUSED):
                    await sandbox.write(f"{path}/made/file", b"0")


async def test_nobody_else_calls_clone3(native: Substrate) -> None:
    """The filter lets only those call it who know a secret: neither guesses nor nothing help."""
    script = """
import ctypes, itertools
libc = ctypes.CDLL(None, use_errno=True)
arguments = (ctypes.c_uint64 * 11)()
arguments[4] = 17
found = set()
for third, fourth in itertools.product((0, 1, -1, 1 << 32), repeat=2):
    pid = libc.syscall(435, arguments, ctypes.c_long(88), ctypes.c_long(third), ctypes.c_long(fourth))
    found.add((pid, ctypes.get_errno()))
print(found)
"""
    async with native.sandbox() as sandbox:
        seen = await sandbox.exec(["python3", "-c", script])
        assert seen.stdout == b"{(-1, 38)}\n", seen


async def test_no_core_goes_anywhere(native: Substrate) -> None:
    """The limit is 1, and stays so: which also keeps the kernel from starting a program for it."""
    script = """
import resource
for limit in ((0, 0), (1, 1)):
    resource.setrlimit(resource.RLIMIT_CORE, limit)
    resource.prlimit(0, resource.RLIMIT_CORE, limit)
print(resource.getrlimit(resource.RLIMIT_CORE))
"""
    async with native.sandbox() as sandbox:
        seen = await sandbox.exec(["python3", "-c", script])
        assert seen.stdout == b"(1, 1)\n", seen
        seen = await sandbox.exec("ulimit -c 0; kill -SEGV $$; echo $?")
        assert seen.signal == 11
        assert (await sandbox.list(".")) == ()


async def test_the_kernel_out_of_memory_spares_init(native: Substrate) -> None:
    limited = getattr(native, "features").controllers  # noqa: B009 (native's own)
    if "memory" not in limited:
        pytest.skip("memory cannot be limited here; to enable it: see `dutyfree doctor`")
    eat = "import os\nwhile True: os.fork() or [bytearray(1 << 20) for _ in range(64)]"
    async with native.sandbox(limits=Limits(memory=96 << 20, pids=64)) as sandbox:
        for _ in range(3):
            await sandbox.exec(["python3", "-c", eat], timeout=3)
            assert (await sandbox.exec("echo alive")).stdout == b"alive\n"
