"""Attacks on the network: ways around a policy, and floods through allowed connections."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from dutyfree import Limits
from dutyfree.contract import NetworkPolicy, Sandbox
from dutyfree.contract.abilities import Chunk, NetworkControl
from dutyfree.engine.host import census
from dutyfree.substrates.native import Native, NativeConfig
from tests import networking
from tests.engine import counts
from tests.networking import Greeter, Resolver, reach
from tests.processes import eventually

pytestmark = pytest.mark.native

ALL: tuple[str, ...] = ("*", "0.0.0.0/0", "::/0")
"""The widest list: everything except the host."""


@pytest.fixture(scope="module")
def resolver() -> Iterator[Resolver]:
    with contextlib.closing(Resolver()) as made:
        yield made


@pytest.fixture
def everywhere() -> Iterator[Greeter]:
    """A server on every address of this machine, which counts its clients."""
    with networking.greeter("::", socket.AF_INET6) as made:
        yield made


@pytest.fixture(scope="module")
async def networked(resolver: Resolver) -> AsyncIterator[Native]:
    async with Native(NativeConfig(resolvers=(f"127.0.0.1:{resolver.port}",))) as substrate:
        yield substrate


def own_addresses() -> list[str]:
    """Addresses of this machine, without its loopback."""
    text = Path("/proc/net/fib_trie").read_text().splitlines()
    found = {before.split()[-1] for before, line in itertools.pairwise(text) if "/32 host LOCAL" in line}
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        found.add(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])))
    return sorted(found)


async def attack(sandbox: Sandbox, script: str) -> str:
    seen = await sandbox.exec(["python3", "-c", textwrap.dedent(script)], timeout=60)
    assert seen.ok, seen.stderr.decode()
    return seen.stdout.decode().strip()


@pytest.mark.parametrize("policy", ["on", ALL])
async def test_the_host_is_not_reached_by_its_addresses(
    networked: Native, everywhere: Greeter, policy: NetworkPolicy
) -> None:
    forms = ["127.0.0.1", "127.1.2.3", "0.0.0.0", "::1", "::", "::ffff:127.0.0.1", "::127.0.0.1", "localhost"]
    forms += ["255.255.255.255", "224.0.0.1", "198.18.0.1", "fd64:7574:7966::1", "169.254.1.1", "fe80::1"]
    forms += [f"::ffff:{address}" for address in own_addresses() if ":" not in address]
    async with networked.sandbox(limits=Limits(network=policy)) as sandbox:
        for address in (*forms, *own_addresses()):
            seen = await sandbox.exec(reach(address, everywhere.port), timeout=60)
            assert (seen.stdout, seen.timed_out) == (b"", False), address
    assert everywhere.visits == 0


async def test_the_host_is_reached_where_it_is_allowed_to_be(networked: Native, everywhere: Greeter) -> None:
    """Without this, the tests above would prove nothing."""
    cases: list[tuple[NetworkPolicy, bool]] = [
        ("on", True),
        (("host",), True),
        ((f"host:{everywhere.port}",), True),
        ((f"host:{everywhere.port - 1}",), False),
        (ALL, False),
        ("off", False),
    ]
    for policy, allowed in cases:
        async with networked.sandbox(limits=Limits(network=policy)) as sandbox:
            seen = await sandbox.exec(reach(str(networked.host_address), everywhere.port), timeout=60)
            assert (seen.stdout == b"greetings\n") == allowed, policy
    assert everywhere.visits == 3


async def test_the_metadata_address_is_not_reached(networked: Native) -> None:
    async with networked.sandbox(limits=Limits(network="on")) as sandbox:
        for address in ("169.254.169.254", "::ffff:169.254.169.254", "169.254.0.1", "169.254.1.3"):
            seen = await sandbox.exec(reach(address, 80), timeout=60)
            assert b"No route to host" in seen.stderr, address


METADATA = ("100.100.100.200", "192.0.0.192", "fd00:42::42", "fd00:c1::a9fe:a9fe", "fd00:100::100:200")
EMBEDDED = (
    "2002:a9fe:a9fe::1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::a9fe:a9fe",
    "2001:db8::5efe:a9fe:a9fe",
    "fec0::77",
)


async def test_metadata_services_next_door(networked: Native, resolver: Resolver) -> None:
    """They answer this machine, but no sandbox: not by address, by name, or through a tunnel."""
    with networking.neighbour() as neighbour:
        await anyio.to_thread.run_sync(neighbour.greet, 8480)
        for address in (*METADATA, *EMBEDDED, "2002:808:808::1"):
            await anyio.to_thread.run_sync(neighbour.answer_to, address)
            with socket.create_connection((address, 8480), 60) as from_here:
                assert from_here.recv(9) == b"neighbour", address
        for policy in ("on", ALL, ("bad.test", "0.0.0.0/1", "::/0")):
            async with networked.sandbox(limits=Limits(network=policy)) as sandbox:
                for address in (*METADATA, *EMBEDDED):
                    resolver.names = {"bad.test": (address,)}
                    for target in (address, "bad.test"):
                        seen = await sandbox.exec(reach(target, 8480), timeout=60)
                        assert (seen.stdout, seen.timed_out) == (b"", False), (policy, target, address)
                seen = await sandbox.exec(reach("2002:808:808::1", 8480), timeout=60)
                assert seen.stdout == b"neighbour\n", seen


@pytest.mark.parametrize("policy", ["on", ("bad.test",), ALL])
async def test_a_name_that_leads_to_the_host(
    networked: Native, resolver: Resolver, everywhere: Greeter, policy: NetworkPolicy
) -> None:
    """The owner of an allowed name can point it to any address, but not to these."""
    async with networked.sandbox(limits=Limits(network=policy)) as sandbox:
        forbidden = ("127.0.0.1", "169.254.169.254", "0.0.0.0", "::1", "::ffff:127.0.0.1")
        for address in (*forbidden, *own_addresses()):
            resolver.names = {"bad.test": (address,)}
            seen = await sandbox.exec(reach("bad.test", everywhere.port), timeout=60)
            assert (seen.stdout, seen.timed_out) == (b"", False), address
        assert everywhere.visits == 0
        resolver.names = {"bad.test": (str(networked.host_address),)}
        seen = await sandbox.exec(reach("bad.test", everywhere.port), timeout=60)
        assert (seen.stdout == b"greetings\n") == (policy == "on")


async def test_names_carry_nothing_out_under_a_list(networked: Native, resolver: Resolver) -> None:
    """Queries for other names are answered here; for allowed names, only name and type go out."""
    resolver.names = {"good.test": ("192.0.2.9",)}
    resolver.asked.clear()
    async with networked.sandbox(limits=Limits(network=("good.test",))) as sandbox:
        found = await attack(
            sandbox,
            """
            import socket
            s = socket.socket(type=socket.SOCK_DGRAM); s.connect(("169.254.1.1", 53)); s.settimeout(50)
            def ask(*labels, kind=1):
                name = b"".join(bytes([len(l)]) + l for l in labels) + b"\\0"
                s.send(b"\\x00\\x07\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0" + name + bytes([0, kind, 0, 1]))
                answer = s.recv(4096)
                return answer[3] & 15
            names = [b"secret/evil/test", b"secret/good/test", b"secret.good/test", b"good/test/evil",
                     b"good.test", b"good/test\\0", b"good/test", b"GoOd/tEsT"]
            print(*[ask(*name.split(b"/")) for name in names], ask(), ask(b"evil", b"test", kind=16))
            """,
        )
        assert found == "3 3 3 3 3 3 0 0 3 3"
        # Not by TCP, and not through another server.
        assert (await sandbox.exec(reach("169.254.1.1", 53))).stdout == b""
        refused = await attack(
            sandbox,
            """
            import socket
            for address in ("8.8.8.8", "127.0.0.53", "169.254.1.2"):
                s = socket.socket(type=socket.SOCK_DGRAM)
                try:
                    s.connect((address, 53)); s.send(b"x"); s.settimeout(5); s.recv(1)
                except OSError as error:
                    print(error.errno, end=" ")
            """,
        )
        assert refused == "101 111 101"
    assert set(resolver.asked) == {"good.test"}  # more than once, and again if the server was slow


async def test_other_protocols_are_refused_at_once(networked: Native) -> None:
    async with networked.sandbox(limits=Limits(network="on")) as sandbox:
        found = await attack(
            sandbox,
            """
            import socket
            def attempt(kind, protocol, target, family=socket.AF_INET):
                try:
                    s = socket.socket(family, kind, protocol); s.settimeout(5)
                    s.connect(target); s.send(bytes([8, 0] + [0] * 6)); s.recv(99)
                    return "answered"
                except OSError as error:
                    return error.errno
            stream, datagram, raw = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW
            print(attempt(datagram, 0, ("192.0.2.1", 123)), attempt(datagram, 1, ("192.0.2.1", 0)),
                  attempt(datagram, 0, ("2001:db8::1", 123), socket.AF_INET6),
                  attempt(stream, 132, ("192.0.2.1", 80)), attempt(raw, 1, ("192.0.2.1", 0)))
            """,
        )
        assert found.split()[:3] == ["101", "101", "101"]
        assert "answered" not in found


async def test_sockets_of_the_host_by_name_are_not_there(networked: Native) -> None:
    """Abstract sockets belong to a network namespace: a sandbox never sees those of the host."""
    name = f"\0dutyfree-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        async with networked.sandbox(limits=Limits(network="on")) as sandbox:
            script = f"import socket; print(socket.socket(socket.AF_UNIX).connect_ex({name!r}))"
            assert await attack(sandbox, script) == "111"


async def test_routes_and_packets_are_not_the_sandboxes_to_change(networked: Native) -> None:
    async with networked.sandbox(limits=Limits(network="on")) as sandbox:
        seen = await sandbox.exec(
            "ip route add 169.254.169.254 dev lo; ip rule del pref 100; ip link add x type dummy;"
            "ip addr flush dev lo"
        )
        assert not seen.ok
        assert b"198.18.0.1" in (await sandbox.exec("cat /proc/net/fib_trie")).stdout


async def test_the_listener_itself(networked: Native, everywhere: Greeter) -> None:
    """The listener that accepts a sandbox's connections is no destination itself."""
    async with networked.sandbox(limits=Limits(network="on")) as sandbox:
        for address in ("127.0.0.1", "198.18.0.1", "169.254.1.1", "::1"):
            seen = await sandbox.exec(reach(address, 1), timeout=60)
            assert (seen.stdout, seen.timed_out) == (b"", False), address


FLOOD = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (60000, 60000))
held = []
for number in range(int(sys.argv[3])):
    s = socket.socket()
    s.setblocking(False)
    try: s.connect_ex((sys.argv[1], int(sys.argv[2])))
    except OSError: break
    held.append(s)
    if len(held) > 2000: held.pop(0).close()
print("flooded", flush=True)
import time; time.sleep(1000)
"""


def _memory(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.load
@pytest.mark.parametrize("target", ["host", "nowhere"])
async def test_a_flood_of_connections_disturbs_no_neighbour(
    networked: Native, everywhere: Greeter, target: str
) -> None:
    """100,000 connections of one sandbox, to a server or to nowhere: bounded, and others go on."""
    address = str(networked.host_address) if target == "host" else "203.0.113.1"
    limits = Limits(network="on")
    async with networked.sandbox(limits=limits) as one, networked.sandbox(limits=limits) as other:
        flood = one.stream(["python3", "-c", FLOOD, address, str(everywhere.port), "100000"])
        ended = anyio.Event()

        async def wait() -> None:
            async for _ in flood:
                ended.set()
                break

        processes = counts.egress(os.getpid())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            reached = 0
            while not ended.is_set() or not reached:
                seen = await other.exec(reach(str(networked.host_address), everywhere.port), timeout=60)
                assert seen.stdout == b"greetings\n", seen.stderr
                reached += 1
                for process in processes:
                    with contextlib.suppress(FileNotFoundError):
                        assert _memory(process) < 64 << 10
                        assert len(os.listdir(f"/proc/{process}/fd")) < 3000


DESTINATIONS = """
import socket, time
began, wanted = time.monotonic(), 8192
print("begun", flush=True)
for number in range(wanted):
    with socket.socket(socket.AF_INET6) as made:
        made.setblocking(False)
        made.connect_ex((f"2001:db8:1::{number:x}", 80))
print(wanted - 1000 * (time.monotonic() - began))
"""


@pytest.mark.parametrize("policy", ["on", ("192.0.2.1",)])
async def test_destinations_of_ipv6_are_not_noted_without_limit(
    networked: Native, policy: NetworkPolicy
) -> None:
    """The kernel keeps a neighbour entry for each, also for refused ones, which no sandbox is charged for."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        if probe.connect_ex(("2001:db8:1::1", 53)):
            pytest.skip("this machine has no route for IPv6, so sandboxes have none")
    async with networked.sandbox(limits=Limits(network=policy)) as sandbox:
        process = await sandbox.start(["python3", "-c", DESTINATIONS])
        output = process.output()
        assert (await anext(output)).data == b"begun\n"
        for _ in range(20):  # waiting ones do not delay others
            assert (await sandbox.exec("true")).ok
        # A burst of this many, then one each millisecond.
        assert float((await anext(output)).data) < 4096 + 100
        forgotten = await sandbox.read("/proc/sys/net/ipv6/neigh/lo/gc_stale_time")
        assert forgotten.split() == [b"1"]


TWO_CALLS = """
import socket, sys
address = (sys.argv[1], int(sys.argv[2]))
first = socket.create_connection(address)
assert first.recv(9) == b"greetings"
print("first", flush=True)
sys.stdin.readline()
second = socket.create_connection(address)
print("second", flush=True)
sys.stdin.readline()
first.close()
assert second.recv(9) == b"greetings"
print("heard", flush=True)
"""
"""One connection that is served, and one that waits in the kernel until the first closes."""


async def test_without_descriptors_the_egress_process_waits_for_one(everywhere: Greeter) -> None:
    """Without a free descriptor, a connection waits, uses no CPU, and is served later."""
    others = counts.egress(os.getpid())
    async with Native(NativeConfig()) as substrate, substrate.sandbox(limits=Limits(network="on")) as sandbox:
        (egress,) = counts.egress(os.getpid()) - others
        address = [str(substrate.host_address), str(everywhere.port)]
        process = await sandbox.start(["python3", "-c", TWO_CALLS, *address], stdin=True)
        output = process.output()
        assert (await anext(output)).data == b"first\n"
        await anyio.to_thread.run_sync(_limit_descriptors, egress)
        await process.write(b"\n")
        assert (await anext(output)).data == b"second\n"
        before = _cpu(egress)
        await anyio.sleep(1)
        assert _cpu(egress) - before < 0.1
        await process.write(b"\n")
        assert (await anext(output)).data == b"heard\n"
        assert (await process.wait()).ok


def _limit_descriptors(process: int) -> None:
    """Lower its limit to the present number, as its own user: that needs no privilege."""

    def used() -> list[int]:
        return sorted(map(int, os.listdir(f"/proc/{process}/fd")))

    assert eventually(lambda: (now := used())[-1] < len(now)), "one is free below the limit"
    user = census.FIRST_ID - 1
    command = ["prlimit", "--pid", str(process), f"--nofile={len(used())}:"]
    subprocess.run(command, check=True, user=user, group=user, extra_groups=[])


def _cpu(process: int) -> float:
    """Seconds of CPU time."""
    return int(Path(f"/proc/{process}/schedstat").read_text().split()[0]) / 1e9


@pytest.mark.load
async def test_a_flood_of_questions_disturbs_no_neighbour(networked: Native, resolver: Resolver) -> None:
    resolver.names = {"good.test": ("192.0.2.9",)}
    flood = (
        "import socket, os\ns = socket.socket(type=socket.SOCK_DGRAM); s.connect(('169.254.1.1', 53))\n"
        "q = b'\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\4good\\4test\\0\\0\\1\\0\\1'\nprint(flush=True)\n"
        "while True:\n try: s.send(os.urandom(2) + q)\n except OSError: pass"
    )
    limits = Limits(network="on")
    async with networked.sandbox(limits=limits) as one, networked.sandbox(limits=limits) as other:
        await one.start(["python3", "-c", flood])
        for _ in range(5):
            seen = await other.exec("getent ahostsv4 good.test", timeout=60)
            assert b"192.0.2.9" in seen.stdout


NEST = """
import mmap, os, resource, select, sys, time
files, epolls, processes = map(int, sys.argv[1:])
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
held = [os.eventfd(0) for _ in range(files)]
inner = [select.epoll() for _ in range(epolls)]
above = select.epoll()
for one in inner:
    above.register(one, select.EPOLLIN)
    for file in held:
        one.register(file, select.EPOLLIN)
done = mmap.mmap(-1, processes)
for number in range(processes):
    if os.fork() == 0:
        while True:
            above.unregister(inner[number])
            above.register(inner[number], select.EPOLLIN)
            done[number] = (done[number] + 1) % 256
seen, total = bytes(processes), 0
while True:
    now = done[:]
    total += sum((new - old) % 256 for new, old in zip(now, seen))
    seen = now
    print(total, flush=True)
    time.sleep(0.02)
"""
"""Nested epolls: on each addition the kernel walks all of them, under a lock of the whole machine."""

CONNECT = """
import socket, sys
for number in range(1, 1 << 30):
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connected:
        assert connected.recv(9) == b"greetings"
    print(number, flush=True)
"""


@pytest.mark.load
async def test_nested_epolls_hold_up_no_neighbour(networked: Native, everywhere: Greeter) -> None:
    """They go on, as far as the attackers leave a CPU: inside the kernel these are not preempted."""
    address = [str(networked.host_address), str(everywhere.port)]
    numbers = {"connections": 0}

    async with networked.sandbox(limits=Limits(network="on")) as other, networked.sandbox() as one:

        async def connect() -> None:
            async for part in other.stream(["python3", "-c", CONNECT, *address]):
                if isinstance(part, Chunk):
                    numbers["connections"] = _last(part.data)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connect)
            async for part in one.stream(["python3", "-c", NEST, "4000", "90", "4"]):
                assert isinstance(part, Chunk), part
                if (attacks := _last(part.data)) <= 4:  # until all of them attack
                    begun = attacks, numbers["connections"]
                if attacks > 44:
                    break
            tasks.cancel_scope.cancel()
    assert numbers["connections"] - begun[1] > (attacks - begun[0]) / 4


def _last(data: bytes) -> int:
    """The last complete number in the output."""
    return int(data.splitlines(keepends=True)[-1]) if data.endswith(b"\n") else 0


def _epolls(process: int) -> dict[int, set[str]]:
    """What each epoll of a process watches, by descriptor, as /proc names the targets."""
    links = {}
    for name in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):
            links[int(name)] = os.readlink(f"/proc/{process}/fd/{name}")
    found = {}
    for number in (number for number, link in links.items() if link == "anon_inode:[eventpoll]"):
        lines = Path(f"/proc/{process}/fdinfo/{number}").read_text().splitlines()
        watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
        found[number] = {links[target] for target in watched if target in links}
    return found


async def test_no_epoll_of_ours_watches_another(everywhere: Greeter) -> None:
    """Adding to a nested epoll takes a lock of the whole machine, which sandboxes can hold."""
    others, launchers = counts.egress(os.getpid()), set(counts.children(os.getpid()))
    async with Native(NativeConfig()) as substrate, AsyncExitStack() as stack:
        address = [str(substrate.host_address), str(everywhere.port)]
        for _ in range(2):
            sandbox = await stack.enter_async_context(substrate.sandbox(limits=Limits(network="on")))
            process = await sandbox.start(["python3", "-c", TWO_CALLS, *address], stdin=True)
            assert (await anext(process.output())).data == b"first\n"
        (egress,) = counts.egress(os.getpid()) - others
        ((watched),) = _epolls(egress).values()
        assert len([name for name in watched if name.startswith("socket:")]) >= 2 * 3, "all that it serves"
        (launcher,) = set(counts.children(os.getpid())) - launchers
        for process_id in (os.getpid(), launcher, *counts.children(launcher)):
            for targets in _epolls(process_id).values():
                assert "anon_inode:[eventpoll]" not in targets, process_id


async def test_who_does_not_read_holds_up_nobody(networked: Native) -> None:
    """Connections that neither read nor close cost only their own sandbox, in bounded memory."""
    with socket.create_server(("127.0.0.1", 0), backlog=600) as silent, networking.greeter() as greeter:
        script = (
            "import socket, time\nheld = []\nfor _ in range(200):\n"
            f" s = socket.create_connection(('{networked.host_address}', {silent.getsockname()[1]}))\n"
            " s.setblocking(False)\n held.append(s)\n"
            " try:\n  while s.send(bytes(1 << 20)): pass\n except OSError: pass\n"
            "print(flush=True)\ntime.sleep(1000)"
        )
        limits = Limits(network="on")
        async with networked.sandbox(limits=limits) as one, networked.sandbox(limits=limits) as other:
            async for _ in one.stream(["python3", "-c", script]):
                break
            for process in counts.egress(os.getpid()):
                assert _memory(process) < 64 << 10
            seen = await other.exec(reach(str(networked.host_address), greeter.port), timeout=60)
            assert seen.stdout == b"greetings\n"


async def test_a_network_that_was_opened_is_not_used_again(networked: Native) -> None:
    """Not even if nothing was sent and all is closed: routes would be left."""
    async with anyio.create_task_group() as group:

        async def open_and_close() -> None:
            async with networked.sandbox(limits=Limits(network="on")) as sandbox:
                assert isinstance(sandbox, NetworkControl)
                await sandbox.set_network("off")

        for _ in range(6):
            group.start_soon(open_and_close)
    async with AsyncExitStack() as stack:
        for _ in range(40):  # at the same time, so that each has its own network
            sandbox = await stack.enter_async_context(networked.sandbox())
            seen = await sandbox.exec("cat /proc/net/fib_trie")
            assert b"127.0.0.1" in seen.stdout
            assert b"Id 100" not in seen.stdout


def say_urgently(listener: socket.socket) -> bytes:
    heard = b""
    with listener, listener.accept()[0] as connected:
        connected.settimeout(60)
        connected.send(b"?", socket.MSG_OOB)
        connected.send(b"answer")
        while data := connected.recv(100):
            heard += data
    return heard


async def test_urgent_data_holds_up_nobody(networked: Native) -> None:
    """The kernel does not splice urgent data, so the relay copies it, in both directions."""
    listener = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    async def serve() -> None:
        heard.append(await anyio.to_thread.run_sync(say_urgently, listener))

    script = """
    import socket, sys
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connected:
        for turn in range(50):
            connected.send(b"!", socket.MSG_OOB)
            connected.sendall(b"more")
        connected.shutdown(socket.SHUT_WR)
        while data := connected.recv(100):
            print(data.decode(), end="")
    """
    async with networked.sandbox(limits=Limits(network="on")) as sandbox, anyio.create_task_group() as group:
        group.start_soon(serve)
        where = [networked.host_address, str(listener.getsockname()[1])]
        seen = await sandbox.exec(["python3", "-c", textwrap.dedent(script), *where], timeout=60)
        assert seen.stdout == b"?answer", seen
    assert heard == [b"!more" * 50]
