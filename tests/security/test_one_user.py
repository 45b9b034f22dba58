"""Without root, all sandboxes and their owner are one user, for whom the kernel has counters with limits."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.engine import unprivileged

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True, scope="module")
def _copy_is_removed() -> Iterator[None]:
    yield
    unprivileged.remove()


SESSION = '''
import anyio, dutyfree, json, os, resource, sys, tempfile

FILL = """
import array, socket, time
many, pairs = array.array("i", [0] * 250), []
try:
    while True:
        pairs.append(socket.socketpair())
        for _ in range(50):
            pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)])
except OSError as error:
    open("full", "w").write(str(error.errno))
"""

async def fill(sandbox):
    """Descriptors in transit: as many as the kernel allows."""
    await sandbox.start(["python3", "-c", FILL + "time.sleep(1000)"])
    with anyio.fail_after(60):
        while not (await sandbox.exec("test -s full")).ok:
            await anyio.sleep(0.05)
    return int(await sandbox.read("full"))

async def terminal(sandbox):
    async with sandbox.terminal("echo on") as held:
        return (await held.wait()).exit_code == 0

async def create(substrate):
    async with substrate.sandbox() as sandbox:
        return (await sandbox.exec("true")).ok

async def attempt(found, name, act, *arguments):
    try:
        with anyio.fail_after(60):
            await act(*arguments)
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"

async def acts(substrate, sandbox):
    """Those that send descriptors: to init, from init, and from the launcher."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        open(f"{directory}/file", "w").write("x")
        await attempt(found, "write", sandbox.write, "large", b"x" * (3 << 20))
        await attempt(found, "read", sandbox.read, "large")
        await attempt(found, "upload", sandbox.upload, directory, "/tmp/up")
        await attempt(found, "download", sandbox.download, "/tmp/up", f"{directory}/down")
        await attempt(found, "terminal", terminal, sandbox)
        await attempt(found, "create", create, substrate)
    return found

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
    async with dutyfree.open("native") as substrate:
        async with substrate.sandbox() as attacker, substrate.sandbox() as neighbour:
            full = await fill(attacker)
            found = [await acts(substrate, neighbour), await acts(substrate, attacker)]
            print(json.dumps([full, found, resource.getrlimit(resource.RLIMIT_NOFILE)]))

anyio.run(main)
'''


@pytest.mark.parametrize("ranges", [False, True], ids=["one-id", "range"])
@pytest.mark.parametrize("soft", [256, 4096])
def test_descriptors_in_transit_stop_no_one_else(soft: int, ranges: bool) -> None:
    """The kernel compares their number with the sender's limit, which is lower in a sandbox."""
    full, found, limits = json.loads(unprivileged.run("-c", SESSION, str(soft), "4096", ranges=ranges))
    assert full == 109  # ETOOMANYREFS: the attack reached the limit
    assert found == [{}, {}]
    assert limits == [soft, 4096]


def test_an_owner_that_cannot_send_descriptors_blames_no_sandbox() -> None:
    """Its user's own programs use them up: the action fails at once, as a fault of the host."""
    body = SESSION.replace(
        "full = await fill(attacker)",
        """
            found = {}
            os.chdir(tempfile.mkdtemp())
            exec(FILL, globals())
            await attempt(found, "write", neighbour.write, "large", b"x" * (3 << 20))
            print(json.dumps(found))
            return""",
    )
    found = json.loads(unprivileged.run("-c", body, "4096", "4096"))
    assert list(found) == ["write"]
    assert found["write"].startswith("DispatchError: ")
    assert "too many descriptors in transit" in found["write"]


def test_users_of_a_sandbox_share_its_limit_of_processes() -> None:
    """Without a control group the kernel counts processes by user, and a sandbox can have 65,536 of them."""
    body = '''
import anyio, dutyfree, json

BOMB = """
import os, time
for user in (0, 1, 65535):
    if os.fork() == 0:
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        count = 0
        try:
            while count < 800:
                if os.fork() == 0:
                    time.sleep(1000)
                count += 1
        except BlockingIOError:
            pass
        open(f"/dev/shm/{user}", "w").write(f"{count}")
        time.sleep(1000)
time.sleep(1000)
"""

async def main():
    async with dutyfree.open("native") as substrate:
        async with substrate.sandbox() as attacker, substrate.sandbox() as neighbour:
            await attacker.start(["python3", "-c", BOMB])
            counts = []
            with anyio.fail_after(60):
                while not all(counts) or len(counts) < 3:
                    await anyio.sleep(0.1)
                    names = sorted(entry.name for entry in await attacker.list("/dev/shm"))
                    counts = [await attacker.read(f"/dev/shm/{name}") for name in names]
            beside = await neighbour.exec("for i in 1 2 3 4 5 6 7 8; do sleep 0.1 & done; wait", user="1")
            print(json.dumps([sum(map(int, counts)), beside.ok]))

anyio.run(main)
'''
    count, beside = json.loads(unprivileged.run("-c", body, ranges=True))
    assert 1800 < count < 2048
    assert beside
