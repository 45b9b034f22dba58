"""Services: ready when the caller gets the sandbox, watched, and gone with their sandbox."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import AsyncIterator
from typing import Any

import pytest

import dutyfree
from dutyfree import Ready, Recipe, Service, Stage
from dutyfree.contract.abilities import Serving
from dutyfree.contract.errors import ActionError, CreateError, UsageError
from tests.awaiting import enter, service_ended
from tests.engine import counts
from tests.processes import eventually, speaking_python

pytestmark = pytest.mark.native

SERVER = textwrap.dedent(
    """
    import os, socket, sys, time
    time.sleep(0.2)
    server = socket.socket(socket.AF_UNIX)
    server.bind(sys.argv[1])
    time.sleep(0.2)
    server.listen()
    while True:
        one, _ = server.accept()
        try:
            one.sendall(b"%d" % os.getpid())
        except BrokenPipeError:  # init only checked whether we listen
            pass
        one.close()
    """
)
ASK = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('server'); print(s.recv(100).decode())"
LISTENING = Service("server", ("python3", "-c", SERVER, "server"), Ready(socket="server"))
SLEEPING = Service("sleeper", "echo begun; exec sleep 1000")


@pytest.fixture
async def native() -> AsyncIterator[Any]:
    async with dutyfree.open("native") as substrate:
        yield substrate


def recipe(*services: Service) -> Recipe:
    return Recipe(services=services)


@pytest.mark.parametrize(
    ("command", "ready"),
    [
        ("sleep 0.3; printf 'all is wel'; sleep 0.1; printf 'l now'; exec sleep 1000", Ready(line="is well")),
        ("sleep 0.3; echo on stderr >&2; exec sleep 1000", Ready(line="on stderr")),
        ("sleep 0.3; mkdir -p made; echo > made/file; exec sleep 1000", Ready(file="made/file")),
        (("python3", "-c", SERVER, "/tmp/server"), Ready(socket="/tmp/server")),
        ("exec sleep 1000", Ready()),
    ],
    ids=["line", "stderr", "file", "socket", "nothing"],
)
async def test_a_service_is_ready_when_the_caller_gets_the_sandbox(
    native: Any, command: Any, ready: Ready
) -> None:
    async with native.sandbox(recipe(Service("one", command, ready))) as sandbox:
        assert issubclass(type(sandbox), Serving)
        (state,) = await sandbox.services()
        assert (state.name, state.running, state.starts, state.exit_code) == ("one", True, 1, None)
        if ready.line:
            assert ready.line.encode() in state.output
        if ready.file:
            assert await sandbox.read(ready.file) == b"\n"
        if ready.socket:
            asked = await sandbox.exec(["python3", "-c", ASK.replace("'server'", repr(ready.socket))])
            assert asked.ok, asked
        assert sandbox.spans[-1].name == "services"


async def test_a_service_sees_the_stages_and_the_service_before_it(native: Any) -> None:
    stage = Stage("setup", commands=("echo from a stage > file",))
    first = Service(
        "first", "cat file > part; mv part copy; exec sleep 1000", Ready(file="copy"), env={"A": "b"}
    )
    second = Service(
        "second", "cat ../copy; echo $A; exec sleep 1000", Ready(line="c\n"), cwd="sub", env={"A": "c"}
    )
    made = Recipe(stages=(stage, Stage("setup", commands=("mkdir sub",))), services=(first, second))
    async with native.sandbox(made) as sandbox:
        assert [state.output for state in await sandbox.services()] == [b"", b"from a stage\nc\n"]


@pytest.mark.parametrize(
    ("service", "says"),
    [
        (
            Service("web", "echo broken >&2; exit 3", Ready(file="f")),
            "service 'web': 'echo broken >&2; exit 3' ended with 3",
        ),
        (Service("web", "echo no config; exit 3", Ready(line="up")), "its last output: no config"),
        (Service("web", ("no-such-program",)), "ended with 127; its last output: No such file"),
        (Service("web", "sleep 1000", cwd="/none"), "ended with 127; its last output: No such file"),
        (Service("web", "exec sleep 1000", Ready(line="up"), 0.3), "within 0.3 s: it did not print 'up'"),
        (Service("web", "sleep 1000", Ready(file="f"), 0.3), "within 0.3 s: there is no f"),
        (Service("web", "sleep 1000", Ready(socket="s"), 0.3), "within 0.3 s: no process listens on s"),
        (Service("web", "sleep 1000", Ready(socket="s" * 200), 9), "File name too long"),
    ],
)
async def test_the_error_names_a_service_that_does_not_become_ready(
    native: Any, service: Service, says: str
) -> None:
    with pytest.raises(CreateError) as raised:
        await enter(native.sandbox(recipe(SLEEPING, service)))
    assert says in str(raised.value)
    assert await native.sandboxes() == []
    async with native.sandbox() as sandbox:  # other sandboxes still work
        assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


async def test_the_error_shows_the_last_output_of_a_service(native: Any) -> None:
    for seconds in (1, 10, 100):  # longer each time, until the machine is fast enough
        slow = Service("web", "echo still loading; exec sleep 1000", Ready(line="up"), seconds)
        with pytest.raises(
            CreateError, match=f"was not ready within {seconds} s: it did not print"
        ) as raised:
            await enter(native.sandbox(recipe(slow)))
        if "; its last output: still loading" in str(raised.value):
            break
    assert "; its last output: still loading" in str(raised.value)


async def test_a_service_that_prints_without_end_becomes_ready(native: Any) -> None:
    loud = Service("loud", "yes | head -c 30000000; echo; echo done; touch f; yes", Ready(line="done"))
    async with native.sandbox(recipe(loud)) as sandbox:
        assert (await sandbox.exec("until [ -e f ]; do sleep 0.02; done", timeout=60)).ok
        (state,) = await sandbox.services()
        assert state.running
        assert len(state.output) == 2000


async def test_a_service_that_ended_can_be_restarted(native: Any) -> None:
    async with native.sandbox(recipe(LISTENING, SLEEPING)) as sandbox:
        pid = (await sandbox.exec(["python3", "-c", ASK])).stdout.decode()
        assert (await sandbox.exec(f"kill -9 {pid}")).ok
        await service_ended(sandbox)
        ended, other = await sandbox.services()
        assert (ended.exit_code, ended.starts, other.running) == (137, 1, True)
        assert not (await sandbox.exec(["python3", "-c", ASK])).ok
        await sandbox.remove("server")
        await sandbox.restart("server")
        assert (await sandbox.services())[0].starts == 2
        assert (await sandbox.exec(["python3", "-c", ASK])).stdout.decode() != pid
        with pytest.raises(UsageError, match=r"no service 'other'.*\n*.*server, sleeper"):
            await sandbox.restart("other")
        with pytest.raises(UsageError, match="does not fork"):
            await sandbox.call("server", ["x"])
        with pytest.raises(ActionError, match=r"(?s)service 'server'.*Address already in use"):
            await sandbox.restart("server")


async def test_a_reset_has_services_of_its_own(native: Any) -> None:
    async with native.sandbox(recipe(LISTENING)) as sandbox:
        await sandbox.exec("kill -9 $(pgrep -f bind) || true; echo trace > file")
        await sandbox.reset()
        (state,) = await sandbox.services()
        assert (state.running, state.starts) == (True, 1)
        assert (await sandbox.exec(["python3", "-c", ASK])).ok
        with pytest.raises(FileNotFoundError):
            await sandbox.read("file")


async def test_forks_and_snapshots_have_services_of_their_own(native: Any) -> None:
    counting = Service("counting", "echo >> starts; exec sleep 1000", Ready(file="starts"))
    async with native.sandbox(recipe(counting)) as sandbox:
        await sandbox.write("file", b"common")
        async with sandbox.fork(2) as children:
            for child in children:
                (state,) = await child.services()
                assert (state.running, state.starts) == (True, 1)
                assert await child.read("file") == b"common"
                seen = await child.exec("until pgrep -x sleep; do :; done", timeout=60)
                assert len(seen.stdout.split()) == 1
        kept = await sandbox.snapshot()
        assert kept.services == (counting,)
        async with native.sandbox(kept) as copy:
            assert (await copy.services())[0].running
        assert (await sandbox.services())[0].running


async def test_a_snapshot_after_a_service_has_ended(native: Any) -> None:
    many = "for i in $(seq 200); do echo $i > many-$i; done"
    async with native.sandbox(recipe(SLEEPING)) as sandbox:
        await sandbox.exec(f"until pkill -x sleep; do :; done; {many}")
        await service_ended(sandbox)  # its shell ends after the sleep that was killed
        await sandbox.snapshot()
        assert not (await sandbox.services())[0].running
        await sandbox.restart("sleeper")
        assert (await sandbox.exec("until pgrep -x sleep; do :; done", timeout=60)).ok
        assert await sandbox.read("many-7") == b"7\n"


async def test_the_timeout_of_a_command_does_not_end_a_service(native: Any) -> None:
    async with native.sandbox(recipe(SLEEPING)) as sandbox:
        assert (await sandbox.exec("sleep 60", timeout=0.1)).timed_out
        await sandbox.pause()
        await sandbox.resume()
        assert (await sandbox.services())[0].running


@pytest.mark.parametrize("name", ["bare", "scripted"])
async def test_other_substrates_refuse(name: str) -> None:
    async with dutyfree.open(name) as substrate:
        with pytest.raises(CreateError, match=f"{name} cannot run services, and the recipe has sleeper"):
            await enter(substrate.sandbox(recipe(SLEEPING)))


OWNER = textwrap.dedent(
    """
    import anyio, dutyfree
    from dutyfree import Recipe, Service, recipes
    async def main():
        async with dutyfree.open("native") as native:
            services = Service("sleeper", "exec sleep 98765"), recipes.python("json")
            async with native.sandbox(Recipe(services=services)) as sandbox:
                print("open", flush=True)
                await sandbox.call("python", ["-c", "import time; time.sleep(1000)"])
    anyio.run(main)
    """
)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_owner_leaves_nothing(how: signal.Signals) -> None:
    with speaking_python(OWNER) as (owner, said):
        assert said == "open"

        def inside() -> list[int]:
            return [child for init in counts.sandboxes(owner.pid) for child in counts.children(init)]

        assert eventually(lambda: len(inside()) >= 3), "the two services, and a fork"
        family, services = counts.Family(owner.pid), inside()
        os.kill(owner.pid, how)
        owner.wait()
        assert not family.remains()
        assert not [pid for pid in services if counts.started(pid)]
