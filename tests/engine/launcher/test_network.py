"""The network of a sandbox, with real servers on the other side."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import threading
import urllib.request
import uuid
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Limits, Ready, Recipe, Service, Stage, port_forward
from dutyfree.contract.errors import CreateError, ExecError, SandboxClosed, UsageError
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.substrates.native import Native, NativeConfig
from tests import networking
from tests.awaiting import enter, together
from tests.engine import counts
from tests.networking import Neighbour, Resolver, reach

pytestmark = pytest.mark.native

WEB = 80


@pytest.fixture(scope="module")
def neighbour() -> Iterator[Neighbour]:
    with networking.neighbour() as made:
        made.greet(WEB)
        made.greet(WEB + 1)
        yield made


@pytest.fixture(scope="module")
def resolver() -> Iterator[Resolver]:
    with contextlib.closing(Resolver()) as made:
        yield made


@pytest.fixture(scope="module")
async def networked(resolver: Resolver) -> AsyncIterator[Native]:
    async with Native(NativeConfig(resolvers=(f"127.0.0.1:{resolver.port}",))) as substrate:
        yield substrate


async def heard(sandbox: NativeSandbox, address: str, port: int = WEB) -> str:
    """What a process in the sandbox receives from there; empty if it gets no connection."""
    seen = await sandbox.exec(reach(address, port), timeout=60)
    assert not seen.timed_out, "a refusal must be told at once"
    return seen.stdout.decode().strip()


async def test_addresses(networked: Native, neighbour: Neighbour) -> None:
    async with networked.sandbox(limits=Limits(network="on")) as sandbox:
        assert await heard(sandbox, neighbour.address) == "neighbour"
        assert await heard(sandbox, neighbour.address6) == "neighbour"
        assert await heard(sandbox, neighbour.address, WEB + 2) == ""
        with socket.create_connection((neighbour.metadata, WEB)) as from_here:
            assert from_here.recv(9) == b"neighbour"
        assert await heard(sandbox, neighbour.metadata) == ""
    allowed = (f"{neighbour.address}:{WEB}", f"[{neighbour.address6}]:{WEB}")
    async with networked.sandbox(limits=Limits(network=allowed)) as sandbox:
        assert await heard(sandbox, neighbour.address) == "neighbour"
        assert await heard(sandbox, neighbour.address6) == "neighbour"
        assert await heard(sandbox, neighbour.address, WEB + 1) == ""
        assert await heard(sandbox, neighbour.other) == ""
    async with networked.sandbox() as sandbox:
        assert await heard(sandbox, neighbour.address) == ""


async def test_names(networked: Native, neighbour: Neighbour, resolver: Resolver) -> None:
    names = {
        "web": (neighbour.address,),
        "a.b": (neighbour.other,),
        "b": (neighbour.other,),
        "six": (neighbour.address6,),
    }
    resolver.names = {f"{name}.{zone}": there for name, there in names.items() for zone in ("open", "test")}
    async with networked.sandbox(limits=Limits(network="on")) as sandbox:
        for name in names:
            assert await heard(sandbox, f"{name}.open") == "neighbour", name
        assert await heard(sandbox, "unknown.open") == ""
    async with networked.sandbox(limits=Limits(network=(f"WEB.test:{WEB}", "*.b.test"))) as sandbox:
        assert await heard(sandbox, neighbour.address) == ""  # no process has resolved the name
        assert await heard(sandbox, "web.test") == "neighbour"
        assert await heard(sandbox, neighbour.address) == "neighbour"
        assert await heard(sandbox, "web.test", WEB + 1) == ""
        assert await heard(sandbox, "b.test") == ""
        assert await heard(sandbox, neighbour.other) == ""
        assert await heard(sandbox, "A.B.test", WEB + 1) == "neighbour"
        assert await heard(sandbox, "six.test") == ""
    asked = {name.lower() for name in resolver.asked}
    assert {name for name in asked if name.endswith(".test")} == {"web.test", "a.b.test"}


async def test_what_another_sandbox_looked_up_is_not_allowed(
    networked: Native, neighbour: Neighbour, resolver: Resolver
) -> None:
    resolver.names = {"web.test": (neighbour.address,)}
    limits = Limits(network=("web.test",))
    async with networked.sandbox(limits=limits) as one, networked.sandbox(limits=limits) as other:
        assert await heard(one, "web.test") == "neighbour"
        assert await heard(other, neighbour.address) == ""


async def test_a_resolver_that_is_gone(neighbour: Neighbour) -> None:
    """Without a DNS server, names fail within seconds; other connections go on."""
    limits = Limits(network="on")
    native = Native(NativeConfig(resolvers=("127.0.0.1:9",)))
    async with native as substrate, substrate.sandbox(limits=limits) as sandbox:
        assert await heard(sandbox, "web.test") == ""
        assert await heard(sandbox, neighbour.address) == "neighbour"


SUM = """
import hashlib, socketserver, sys
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        data = self.rfile.read()
        self.wfile.write(hashlib.sha256(data).hexdigest().encode() + data)
server = socketserver.ThreadingTCPServer(('127.0.0.1', 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
SEND = """
import hashlib, os, socket, sys
data = os.urandom(1 << 16) * 320
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
import threading
threading.Thread(target=lambda: (s.sendall(data), s.shutdown(socket.SHUT_WR))).start()
back = b''.join(iter(lambda: s.recv(1 << 20), b''))
print(back[:64] == hashlib.sha256(data).hexdigest().encode(), back[64:] == data)
"""


async def test_bytes_and_ends_arrive_both_ways(networked: Native) -> None:
    """Four connections at once send 20 MB, half-close, and receive 20 MB."""
    server = await anyio.to_thread.run_sync(
        lambda: subprocess.Popen(["python3", "-c", SUM], stdout=subprocess.PIPE)
    )
    try:
        assert server.stdout is not None
        port = (await anyio.to_thread.run_sync(server.stdout.readline)).decode().strip()
        async with networked.sandbox(limits=Limits(network=("host",))) as sandbox:
            command = ["python3", "-c", SEND, str(networked.host_address), port]

            async def one() -> None:
                assert (await sandbox.exec(command, timeout=60)).stdout == b"True True\n"

            await together(*[one] * 4)
    finally:
        server.kill()
        await anyio.to_thread.run_sync(server.communicate)


async def test_git(networked: Native, tmp_path: Path) -> None:
    script = f"""
        set -e; git init -q {tmp_path}/served; cd {tmp_path}/served; head -c 3000000 /dev/urandom > data
        git add .; git -c user.name=a -c user.email=b commit -qm one
    """
    await anyio.run_process(["sh", "-c", script])
    with serving(["git", "daemon", "--inetd", "--export-all", f"--base-path={tmp_path}"]) as port:
        async with networked.sandbox(limits=Limits(network=(f"host:{port}",))) as sandbox:
            clone = f"git clone -q git://{networked.host_address}:{port}/served copy"
            seen = await sandbox.exec(clone, timeout=60)
            assert seen.ok, seen.stderr
            wanted = hashlib.sha256((tmp_path / "served/data").read_bytes()).hexdigest()
            assert (await sandbox.exec("sha256sum copy/data")).stdout.split()[0].decode() == wanted


@contextlib.contextmanager
def serving(command: list[str]) -> Iterator[int]:
    """A loopback port where this command talks to the first client."""

    def accept() -> None:
        with contextlib.suppress(OSError):
            connected, _ = server.accept()
            with connected:
                subprocess.run(command, stdin=connected.fileno(), stdout=connected.fileno(), check=False)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # if no client came
            thread.join()


async def test_pip(networked: Native, tmp_path: Path) -> None:
    """Install a package from an index on this machine, and reach nothing else of the machine."""
    async with networked.sandbox() as sandbox:
        if not (await sandbox.exec("python3 -m pip --version")).ok:
            pytest.skip("pip is missing; to enable it: apt-get install python3-pip")
    directory = tmp_path / "simple/greeting"
    directory.mkdir(parents=True)
    with zipfile.ZipFile(directory / "greeting-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("greeting.py", "text = 'installed'\n")
        wheel.writestr(
            "greeting-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n"
        )
        wheel.writestr(
            "greeting-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("greeting-1.0.dist-info/RECORD", "")
    index = await anyio.open_process(
        ["python3", "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    )
    try:
        assert index.stdout is not None
        port = (await index.stdout.receive()).split(b" port ")[1].split()[0].decode()
        url = f"http://{networked.host_address}:{port}/simple"
        recipe = Recipe(
            stages=(
                Stage(
                    "dependencies",
                    commands=(
                        f"python3 -m pip install -q --index-url {url} --disable-pip-version-check "
                        f"--trusted-host {networked.host_address} --target packages greeting",
                    ),
                ),
            )
        )
        async with networked.sandbox(recipe) as sandbox:
            seen = await sandbox.exec(
                "PYTHONPATH=packages python3 -c 'import greeting; print(greeting.text)'"
            )
            assert seen.stdout == b"installed\n", seen.stderr
            assert not (await sandbox.exec(reach(str(networked.host_address), int(port)))).ok
    finally:
        index.kill()
        await index.aclose()


async def test_stages_have_a_network_of_their_own(networked: Native) -> None:
    once = f"readlink /proc/self/ns/net > network; : {uuid.uuid4()}"  # no old layer
    recipe = Recipe(stages=(Stage("setup", commands=(once,)),))
    async with networked.sandbox(recipe) as sandbox:
        assert (await sandbox.read("network")).decode().strip() != os.readlink("/proc/self/ns/net")


async def test_a_reset_keeps_the_policy(networked: Native, neighbour: Neighbour) -> None:
    async with networked.sandbox(limits=Limits(network="on")) as sandbox:
        await sandbox.reset()
        assert await heard(sandbox, neighbour.address) == "neighbour"
        await sandbox.set_network("off")  # type: ignore[attr-defined]
        await sandbox.reset()
        assert await heard(sandbox, neighbour.address) == ""
        await sandbox.set_network((neighbour.address,))  # type: ignore[attr-defined]
        await sandbox.reset()
        assert await heard(sandbox, neighbour.address) == "neighbour"
        assert await heard(sandbox, neighbour.other) == ""


async def test_nonsense_is_told(networked: Native) -> None:
    with pytest.raises(CreateError, match="never in reach"):
        await enter(networked.sandbox(limits=Limits(network=("127.0.0.1",))))
    async with networked.sandbox() as sandbox:
        with pytest.raises(UsageError, match="no port"):
            await sandbox.set_network(("example.org:http",))  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="no port 0"):
            await sandbox.connect(0)
    with pytest.raises(SandboxClosed):
        await sandbox.set_network("on")  # type: ignore[attr-defined]
    with pytest.raises(SandboxClosed):
        await sandbox.connect(80)


async def test_a_port_taken_in_the_sandbox_is_told(networked: Native, neighbour: Neighbour) -> None:
    """A process that holds the DNS port prevents only its own sandbox's network."""
    take = "import socket, time; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 53)); time.sleep(99)"
    async with networked.sandbox() as sandbox:
        process = await sandbox.start(["python3", "-c", take])
        await sandbox.exec("until grep -q :0035 /proc/net/udp; do sleep 0.02; done")
        with pytest.raises(dutyfree.errors.ActionError, match="holds UDP port 53"):
            await sandbox.set_network("on")  # type: ignore[attr-defined]
        assert await heard(sandbox, neighbour.address) == ""
        await process.kill()
        await sandbox.set_network("on")  # type: ignore[attr-defined]
        assert await heard(sandbox, neighbour.address) == "neighbour"


async def test_a_port_taken_by_a_service_of_the_recipe(networked: Native) -> None:
    """No agent has run in a sandbox that the pool hands out, so this is a CreateError."""
    take = (
        "import socket, time; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 53)); "
        "print('bound', flush=True); time.sleep(999)"
    )
    service = Service("names", ("python3", "-c", take), Ready(line="bound"))
    recipe = Recipe(services=(service,))
    with pytest.raises(CreateError, match="holds UDP port 53"):
        await enter(networked.group(recipe, 1, limits=Limits(network="on")))


async def test_forwarding_a_port(networked: Native) -> None:
    async with networked.sandbox() as sandbox:
        await sandbox.write("page", b"of the sandbox")
        await sandbox.start("python3 -m http.server 8000 --bind ::1")
        async with port_forward.forward(sandbox, 8000) as (host, port):

            def fetch() -> bytes:
                with urllib.request.urlopen(f"http://{host}:{port}/page", timeout=20) as page:
                    return bytes(page.read())

            for _ in range(1000):
                with contextlib.suppress(OSError):
                    if await anyio.to_thread.run_sync(fetch) == b"of the sandbox":
                        break
                await anyio.sleep(0.05)
            assert await anyio.to_thread.run_sync(fetch) == b"of the sandbox"


async def test_the_end_of_the_egress_process_is_told(neighbour: Neighbour) -> None:
    """Sandboxes that use it end with an ExecError; others go on; new ones get a new egress process."""
    async with Native(NativeConfig()) as substrate, substrate.sandbox() as plain:
        others = counts.egress(os.getpid())
        async with substrate.sandbox(limits=Limits(network="on")) as sandbox:
            (process,) = counts.egress(os.getpid()) - others
            status = await anyio.Path(f"/proc/{process}/status").read_text()
            assert "CapEff:\t0000000000000000" in status
            assert "Seccomp:\t2" in status
            sleeping = await sandbox.start("sleep 60")
            os.kill(process, signal.SIGKILL)
            with pytest.raises(ExecError):
                await sleeping.wait()
        assert (await plain.exec("echo on")).stdout == b"on\n"
        async with substrate.sandbox(limits=Limits(network="on")) as sandbox:
            assert await heard(sandbox, neighbour.address) == "neighbour"


async def test_nothing_is_left(neighbour: Neighbour) -> None:
    others = await anyio.to_thread.run_sync(counts.children, os.getpid())
    async with Native(NativeConfig()) as substrate:
        for _ in range(20):
            async with substrate.sandbox(limits=Limits(network="on")) as sandbox:
                await sandbox.start(["python3", "-c", networking.BY, neighbour.address, str(WEB)])
        async with substrate.sandbox(limits=Limits(network="on")) as sandbox:
            await sandbox.start("sleep 1000")
            family = await anyio.to_thread.run_sync(counts.Family, os.getpid(), others)
            assert len(family.processes) >= 3  # launcher, egress process, init
    assert not await anyio.to_thread.run_sync(family.remains)
