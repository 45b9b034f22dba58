"""The native engine for somebody without any rights: the same promises, but for those said to be lost."""

from __future__ import annotations

import errno
import json
import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from dutyfree.engine.host import features
from tests.engine import counts, unprivileged
from tests.processes import eventually

pytestmark = pytest.mark.native

PATIENCE = os.environ.get("DUTYFREE_PATIENCE", "1")  # on slow machines

SESSION = """
import anyio, dutyfree, json, os, sys
from dutyfree import Limits, Recipe, Stage
from dutyfree.contract.errors import CreateError, DispatchError

async def main():
    async with dutyfree.open("native") as substrate:
        print(json.dumps(await run(substrate)))

{body}

anyio.run(main)
"""


@pytest.fixture(autouse=True, scope="module")
def _copy_is_removed() -> Iterator[None]:
    yield
    unprivileged.remove()


def ask(body: str, *, ranges: bool = False) -> object:
    return json.loads(unprivileged.run("-c", SESSION.format(body=body), ranges=ranges))


either = pytest.mark.parametrize("ranges", [False, True], ids=["one-id", "range"])


@pytest.mark.slow
@either
def test_the_conformance_suite_passes(ranges: bool) -> None:
    words = ("-m", "dutyfree.conformance", "native", "--json", "--patience", PATIENCE)
    out = unprivileged.run(*words, ranges=ranges)
    found = json.loads(out)
    skipped = {one["check"].split(".")[-1] for one in found["results"] if one["outcome"] == "not offered"}
    assert found["failed"] == 0
    # A single id allows no other user; a network that leads out is root's, and so may be a limit of memory.
    memory = {"out_of_memory", "out_of_memory_in_the_background"}
    users = (
        "no_processes_left" if ranges else "user"
    )  # a limit of processes for several users takes a control group
    assert skipped <= {"network_changes", "network_nonsense", users, *memory}


def test_what_is_lost_is_said_and_refused() -> None:
    body = """
async def run(substrate):
    refused = []
    asked = {"memory": Limits(memory=64 << 20), "cpus": Limits(cpus=0.5)}
    asked["network"] = Limits(network=("example.org",))
    for name, limits in asked.items():
        try:
            async with substrate.sandbox(limits=limits):
                pass
        except CreateError as error:
            refused.append([name, str(error)])
    return {"mode": substrate.features.mode, "ids": substrate.features.ids, "refused": refused,
            "controllers": substrate.features.controllers, "lost": (await substrate.facts())["lost"]}
"""
    found = ask(body)
    assert isinstance(found, dict)
    assert (found["mode"], found["ids"]) == ("rootless", 1)
    if not found["controllers"]:
        assert [name for name, _ in found["refused"]] == ["memory", "cpus", "network"]
        assert "cannot limit memory here" in found["refused"][0][1]
        assert "no limit of memory" in found["lost"]
    assert "no other user than root" in found["lost"]


def test_what_is_given_back_is_verified_and_used_again() -> None:
    body = """
async def run(substrate):
    await substrate.prefetch([Recipe()], 1)
    pool = substrate.pool
    await pool.until_idle(Recipe(), 1)
    kinds, left = [], []
    for _ in range(3):
        async with substrate.sandbox() as sandbox:
            kinds.append(sandbox.served.kind)
            seen = await sandbox.exec("ls -A . /dev/shm; echo > left; echo > /dev/shm/left")
            left.append(seen.stdout.decode())
        await pool.until_idle(Recipe(), 1)
    return {"kinds": kinds, "left": left, "discarded": pool.ledger.events["discarded"]}
"""
    found = ask(body)
    assert found == {"kinds": ["warm"] * 3, "left": [".:\n\n/dev/shm:\n"] * 3, "discarded": 0}


def test_another_user_is_refused_with_what_to_do() -> None:
    body = """
async def run(substrate):
    async with substrate.sandbox() as sandbox:
        seen = [await sandbox.exec("id", user="nobody")]
        async with sandbox.terminal("id", user="nobody") as held:
            seen.append(await held.wait())
        refused = [one.stderr.decode() for one in seen if one.exit_code == 126 and not one.started]
        assert (await sandbox.exec("id -u")).stdout == b"0\\n"
    return refused
"""
    found = ask(body)
    assert isinstance(found, list)
    assert len(found) == 2
    for said in found:
        assert "cannot run a command as 'nobody': the sandbox does not have this user id" in said
        assert "/etc/subuid" in said
        assert "dutyfree doctor" in said


def test_the_hosts_software_can_be_added_to_and_replaced() -> None:
    body = """
async def run(substrate):
    commands = ("echo 1 > /usr/local/made", "rm -rf /usr/share/doc", "echo 2 > /etc/made", "mkdir /opt/x",
                "rm /usr/bin/env && echo mine > /usr/bin/env")
    seen = []
    for _ in range(2):
        async with substrate.sandbox(Recipe(stages=(Stage("setup", commands=commands),))) as sandbox:
            look = "cat /usr/local/made /etc/made /usr/bin/env; ls /usr/share/doc; ls -d /opt/x; rm /etc/made"
            seen.append((await sandbox.exec(look)).stdout.decode())
    return seen
"""
    assert ask(body) == ["1\n2\nmine\n/opt/x\n"] * 2


@either
def test_marks_of_the_overlay_cannot_be_forged(ranges: bool) -> None:
    """Where the overlay keeps its marks in attributes that everybody may write."""
    body = """
async def run(substrate):
    forge = (
        "import os\\n"
        "marks = {'opaque': b'y', 'redirect': b'/etc', 'metacopy': b'', 'whiteout': b''}\\n"
        "for name, value in marks.items():\\n"
        "    for path in ('d', 'd/file', '/etc/profile.d', '/usr/lib/python3'):\\n"
        "        try: os.setxattr(path, 'user.overlay.' + name, value)\\n"
        "        except OSError: pass\\n"
        "try: os.mknod('/etc/white', 0o20000, 0); print('device')\\n"
        "except OSError: pass\\n"
    )
    look = "ls -A d /etc /usr/lib/python3 | sort; cat d/file"
    seen = []
    async with substrate.sandbox() as sandbox:
        await sandbox.exec("mkdir -p d /etc/profile.d; echo whole > d/file")
        seen.append((await sandbox.exec(look)).stdout.decode())
        forged = await sandbox.exec(["python3", "-c", forge])
        seen.append((await sandbox.exec(look)).stdout.decode())
        for turn in range(2):
            async with substrate.sandbox(await sandbox.snapshot()) as copy:
                seen.append((await copy.exec(look)).stdout.decode())
            if not turn:
                await sandbox.exec("for i in $(seq 200); do echo > /tmp/$i; done")
    return [forged.stdout.decode(), seen]
"""
    found = ask(body, ranges=ranges)
    assert isinstance(found, list)
    said, seen = found
    assert said == ""
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert "whole" in seen[0]


def test_the_network_is_the_hosts_own_or_none() -> None:
    body = """
async def run(substrate):
    import socket
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 100)"
    found = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = ["python3", "-c", reach, substrate.host_address, str(server.getsockname()[1])]
        for network in ("on", "off"):
            async with substrate.sandbox(limits=Limits(network=network)) as sandbox:
                found.append((await sandbox.exec(command)).ok)
    return found
"""
    assert ask(body) == [True, False]


def test_processes_are_counted() -> None:
    body = """
async def run(substrate):
    bomb = "i=0; while [ $i -lt 200 ]; do sleep 20 & i=$((i + 1)); done; wait; echo all"
    async with substrate.sandbox(limits=Limits(pids=40)) as one, substrate.sandbox() as other:
        seen = await one.exec(bomb, timeout=60)
        beside = await other.exec("for i in 1 2 3 4 5 6 7 8; do sleep 0.1 & done; wait; echo fine")
    return [seen.stdout.decode(), seen.stderr.decode()[-200:], beside.stdout.decode()]
"""
    found = ask(body)
    assert isinstance(found, list)
    out, errors, beside = found
    assert "all" not in out or errors
    assert beside == "fine\n"


def test_a_pause_by_signals_counts_for_no_timeout() -> None:
    body = """
async def run(substrate):
    async with substrate.sandbox() as sandbox:
        seen = []
        async def wait():
            seen.append(await sandbox.exec("sleep 0.6; echo done", timeout=10))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.2)
            await sandbox.pause()
            await anyio.sleep(11)
            await sandbox.resume()
        return [seen[0].stdout.decode(), seen[0].timed_out, (await sandbox.exec("true")).ok]
"""
    assert ask(body) == ["done\n", False, True]


@either
def test_a_sandbox_sees_nothing_of_its_owner(ranges: bool) -> None:
    """Which has the same id on the host: neither its processes nor its files nor its sockets."""
    body = """
async def run(substrate):
    secret = f"/tmp/dutyfree-secret-{os.getpid()}"
    with open(secret, "w") as file:
        file.write("mine")
    try:
        async with substrate.sandbox() as one, substrate.sandbox() as other:
            await other.exec("sleep 60 & sleep 0.1")
            kill = "import os, signal; print([p for p in range(2, 40000) if os.path.exists(f'/proc/{p}')])"
            seen = {
                "processes": (await one.exec(["python3", "-c", kill])).stdout.decode(),
                "secret": (await one.exec(["cat", secret])).exit_code,
                "init": (await one.exec("cat /proc/1/environ /proc/1/mem; ls /proc/1/fd")).exit_code,
                "below": (await one.exec("cat /proc/self/mountinfo | grep -c ' / /proc '")).stdout.decode(),
                "mount": (await one.exec("mount -t tmpfs t /tmp")).exit_code,
                "device": (await one.exec("mknod /tmp/d b 8 0; echo x > /dev/kmsg")).exit_code,
            }
    finally:
        os.unlink(secret)
    return seen
"""
    found = ask(body, ranges=ranges)
    assert isinstance(found, dict)
    assert len(json.loads(found["processes"])) <= 2
    assert found["below"].strip() == "1"
    assert all(found[name] != 0 for name in ("secret", "init", "mount", "device"))


@pytest.mark.parametrize("killed", ["owner", "launcher"])
@either
def test_nothing_is_left_after_a_kill(killed: str, ranges: bool) -> None:
    body = """
async def run(substrate):
    async with substrate.sandbox() as sandbox:
        for user in ("", "1000", "65535")[: 3 if substrate.features.ids > 1 else 1]:
            await sandbox.exec("sleep 1000 & sleep 0.1", user=user or None)
        print(os.getpid(), substrate.node.launcher.pid, flush=True)
        await anyio.sleep(60)
"""
    process = unprivileged.start("-c", SESSION.format(body=body), ranges=ranges)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    owner, launcher = map(int, line.split())
    inits = children(launcher)
    assert inits
    inits += [child for init in inits for child in children(init)]
    os.kill(owner if killed == "owner" else launcher, signal.SIGKILL)
    assert eventually(lambda: not any(map(lives, (launcher, *inits))))
    process.kill()
    process.communicate()


def lives(pid: int) -> bool:
    fields = status(pid)
    return bool(fields) and fields[0] != "Z"  # one that only its parent has yet to notice


def children(pid: int) -> list[int]:
    return [other for other in counts.processes() if status(other)[1:2] == [str(pid)]]


def status(pid: int) -> list[str]:
    """What follows the name: state, parent and more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def test_a_range_of_ids_is_used_and_bounds_the_sandbox() -> None:
    body = """
async def run(substrate):
    become = (
        "import os, sys\\n"
        "def attempt(call, *ids):\\n"
        "    try: call(*ids)\\n"
        "    except OSError as error: return error.errno\\n"
        "    return 0\\n"
        "made = os.open('made', os.O_CREAT)\\n"
        "beyond = (65536, 54321 + 65536, 7000000, 7000001, 1 << 30, (1 << 32) - 2)\\n"
        "print([attempt(os.fchown, made, id, id) for id in beyond],\\n"
        "      [attempt(os.setresuid, id, id, id) for id in beyond],\\n"
        "      attempt(os.fchown, made, 65535, 65535), attempt(os.setresuid, 65535, 65535, 65535))\\n"
    )
    async with substrate.sandbox() as sandbox:
        seen = [(await sandbox.exec("id -u", user=user)).stdout.decode() for user in ("1", "1000", "65535")]
        tried = (await sandbox.exec(["python3", "-c", become])).stdout.decode()
        none = await sandbox.exec("id", user="65536")
    return [substrate.features.ids, seen, tried, none.started]
"""
    refused = [errno.EINVAL] * 6
    wanted = [65536, ["1\n", "1000\n", "65535\n"], f"{refused} {refused} 0 0\n", False]
    assert ask(body, ranges=True) == wanted


def test_processes_of_other_users_end_with_their_command() -> None:
    body = """
async def run(substrate):
    leave = (
        "import os, signal, sys, time\\n"
        "for user in (0, 5, 1000, 65535):\\n"
        "    if os.fork() == 0:\\n"
        "        os.setsid()\\n"
        "        if os.fork(): os._exit(0)\\n"
        "        os.setresgid(user, user, user); os.setresuid(user, user, user)\\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
        "        for number in range(3): os.close(number)\\n"
        "        os.execve('/usr/bin/sleep', ['sleep', '1000'], {})\\n"
        "time.sleep(1000)\\n"
    )
    look = "cat /proc/[0-9]*/comm | grep -c sleep"
    async with substrate.sandbox() as sandbox:
        process = await sandbox.start(["python3", "-c", leave])
        with anyio.fail_after(60):
            while (await sandbox.exec(look)).stdout != b"4\\n":
                await anyio.sleep(0.05)
        await process.kill()
        await process.wait()
        killed = await sandbox.exec(look)
        late = await sandbox.exec(["python3", "-c", leave], timeout=3)
        return [killed.stdout.decode(), late.timed_out, (await sandbox.exec(look)).stdout.decode()]
"""
    assert ask(body, ranges=True) == ["0\n", True, "0\n"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            "cgroup=none mode=rootless ids=1 groups=kept",
            features.HostFeatures("rootless", "none", (), 1, "kept"),
        ),
        (
            "cgroup=v2:memory:pids mode=root ids=65536 groups=dropped",
            features.HostFeatures("root", "v2", ("memory", "pids"), 65536, "dropped"),
        ),
    ],
)
def test_what_the_launcher_says(text: str, wanted: features.HostFeatures) -> None:
    assert features.parse(text) == wanted


def test_what_no_launcher_says() -> None:
    with pytest.raises(ValueError, match="not the report of a launcher"):
        features.parse("cgroup=v3 mode=none")


def test_services_run_and_fork() -> None:
    program = """
    import anyio, dutyfree
    from dutyfree import Ready, Recipe, Service, recipes
    services = Service("sleeper", "touch up; exec sleep 1000", Ready(file="up")), recipes.python("json")

    async def main():
        async with dutyfree.open("native") as native, native.sandbox(Recipe(services=services)) as sandbox:
            seen = await sandbox.call("python", ["-c", "print(1)"], env={"DUTYFREE_EXPLAIN": "1"})
            assert (seen.stdout, seen.stderr) == (b"1\\n", b""), seen
            assert (await sandbox.call("python", ["-c", "import time; time.sleep(9)"], timeout=0.5)).timed_out
            assert all(state.running for state in await sandbox.services())

    anyio.run(main)
    """
    unprivileged.run("-c", textwrap.dedent(program))


def test_a_user_without_a_home_is_told_where_to_keep_the_cache() -> None:
    program = """
from dutyfree import errors, paths
from dutyfree.engine.images import credentials
try:
    paths.cache()
except errors.UsageError as error:
    print(error)
print(credentials.find("example.org"))
"""
    told, login = unprivileged.run("-c", program).splitlines()
    assert told.endswith("has no home directory (set DUTYFREE_CACHE to a directory)")
    assert login == "None"
