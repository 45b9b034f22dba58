"""The egress process, built with sanitizers, against hostile sandboxes and DNS servers.

A sanitizer that finds something ends the process, and with it every sandbox that has a network: the
commands of the test fail.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dutyfree import Limits
from dutyfree.contract import NetworkPolicy
from dutyfree.engine.launcher import network_policy, protocol
from dutyfree.engine.launcher.protocol import Request
from dutyfree.substrates.native import Native, NativeConfig
from tests.engine.launcher.test_protocol import Launcher

ROUNDS = int(os.environ.get("DUTYFREE_FUZZ", "400"))

pytestmark = pytest.mark.native

QUESTIONS = """
import random, socket, sys
chance, rounds = random.Random(int(sys.argv[1])), int(sys.argv[2])
s = socket.socket(type=socket.SOCK_DGRAM)
s.connect(("169.254.1.1", 53))
s.settimeout(5)
name = b"\\3www\\7example\\4test\\0"
sound = b"\\x12\\x34\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0" + name + b"\\0\\1\\0\\1"
extended = sound[:11] + b"\\1" + sound[12:] + b"\\0\\0\\x29\\4\\xd0\\0\\0\\0\\0\\0\\0"
for _ in range(rounds):
    noise = chance.randbytes(chance.choice([0, 1, 11, 12, 40, 4000, 9000]))
    data = bytearray(chance.choice([sound, extended, noise]))
    for _ in range(chance.randrange(4) if data else 0):
        data[chance.randrange(len(data))] = chance.choice([0, 1, 63, 64, 192, 255, chance.randrange(256)])
    if chance.random() < 0.2:
        data = data[:chance.randrange(len(data) + 1)]
    if chance.random() < 0.1:
        data = sound[:12] + (b"\\x3f" + b"a" * 63) * chance.randrange(6) + b"\\0\\0\\1\\0\\1"
    s.send(data)
data = b""
s.settimeout(0.2)
while data[:2] != b"\\xab\\xcd":  # among so many it may be dropped, or get no matching answer
    try:
        data = s.recv(9000)
    except TimeoutError:
        s.send(b"\\xab\\xcd" + sound[2:])
print("answered")
"""

UNHEARD = """
import socket
s = socket.socket(type=socket.SOCK_DGRAM)
s.connect(("169.254.1.1", 53))
s.settimeout(30)
s.send(b"\\x12\\x34\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\6silent\\4test\\0\\0\\1\\0\\1")
print(s.recv(9000)[3] & 15)
"""


class Liar:
    """A DNS server whose answers are broken in many ways."""

    def __init__(self) -> None:
        self._socket = socket.socket(type=socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.chance = random.Random(7)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                asked, address = self._socket.recvfrom(9000)
            except OSError:
                return
            if len(asked) >= 12 and b"silent" not in asked:
                self._socket.sendto(self._answer(asked), address)

    def _answer(self, asked: bytes) -> bytes:
        end = asked.index(b"\0", 12) + 5 if b"\0" in asked[12:] else len(asked)
        count = self.chance.choice([0, 1, 2, 300, 65535])
        head = asked[:2] + struct.pack(">HHHHH", 0x8180, 1, count, 0, 0)
        answer = head + asked[12:end]
        for _ in range(min(count, 40)):
            name = self.chance.choice(
                [b"\xc0\x0c", b"\xc0", b"\x01a\0", b"\0", b"\x3f", b"\xff\xff", b"\x80\0"]
            )
            kind = self.chance.choice([1, 28, 5, 41, 65535])
            length = self.chance.choice([0, 4, 16, 5, 65535])
            data = self.chance.randbytes(self.chance.choice([0, 4, 16]))
            answer += (
                name + struct.pack(">HHIH", kind, 1, self.chance.choice([0, 5, 2**32 - 1]), length) + data
            )
        return answer[: self.chance.choice([len(answer), len(answer), 11, 12, 4096, end])]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.close()


@pytest.fixture(scope="module")
async def sanitized(program: Path, liar: Liar) -> AsyncIterator[Native]:
    async with Native(NativeConfig(program=str(program), resolvers=(f"127.0.0.1:{liar.port}",))) as substrate:
        yield substrate


@pytest.mark.parametrize("network", ["on", ("*.example.test", "example.org:443", "*")])
async def test_questions_and_answers_at_random(sanitized: Native, network: NetworkPolicy) -> None:
    async with sanitized.sandbox(limits=Limits(network=network)) as sandbox:
        for seed in range(3):
            command = ["python3", "-c", QUESTIONS, str(seed), str(ROUNDS)]
            seen = await sandbox.exec(command, timeout=120)
            assert seen.stdout == b"answered\n", seen.stderr


async def test_a_resolver_that_says_nothing_is_given_up(sanitized: Native) -> None:
    async with sanitized.sandbox(limits=Limits(network="on")) as sandbox:
        seen = await sandbox.exec(["python3", "-c", UNHEARD], timeout=60)
        assert seen.stdout == b"2\n", seen.stderr


CONNECTIONS = """
import random, socket, struct, sys
chance = random.Random(int(sys.argv[1]))
held = []
for _ in range(int(sys.argv[2])):
    s = socket.socket()
    s.setblocking(False)
    address = chance.choice(["169.254.1.2", "169.254.1.1", "10.255.0.1", "198.18.0.1"])
    s.connect_ex((address, chance.choice([int(sys.argv[3]), 53, 1])))
    try:
        s.send(chance.randbytes(chance.choice([1, 100, 100000])))
        s.recv(100)
    except OSError:
        pass
    if chance.random() < 0.3:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if chance.random() < 0.3:
        try: s.shutdown(chance.choice([0, 1, 2]))
        except OSError: pass
    if chance.random() < 0.5:
        s.close()
    held.append(s)
print("done")
"""


async def test_connections_at_random(sanitized: Native) -> None:
    """Closes, resets and floods in any order, while the policy changes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=_echo, args=(server,), daemon=True).start()
        async with sanitized.sandbox(limits=Limits(network="on")) as sandbox:
            for seed in range(4):
                command = ["python3", "-c", CONNECTIONS, str(seed), str(ROUNDS), str(port)]
                process = await sandbox.start(command)
                policies: list[NetworkPolicy] = ["on", ("host",), "off", "on"]
                for wanted in policies:
                    await sandbox.set_network(wanted)  # type: ignore[attr-defined]
                assert (await process.wait()).stdout == b"done\n"


def _echo(server: socket.socket) -> None:
    chance = random.Random(9)
    while True:
        try:
            connected, _ = server.accept()
            connected.settimeout(0.01)
            with connected:
                connected.sendall(connected.recv(1000) * chance.choice([1, 100]))
        except TimeoutError:
            continue
        except ConnectionError:
            continue
        except OSError:
            return


def test_policies_at_random(program: Path) -> None:
    """Invalid counts, sizes and kinds are refused, and the sandbox goes on."""
    launcher = Launcher(program)
    launcher.fill()
    chance = random.Random(8)
    launcher.sandbox()
    sound = network_policy.encode(
        ("example.org:443", "10.0.0.0/8", "host"), network_policy.parse_resolvers(["127.0.0.1"])
    )
    for _ in range(ROUNDS):
        body = bytearray(sound)
        for _ in range(chance.randrange(1, 5)):
            body[chance.randrange(len(body))] = chance.choice([0, 1, 128, 129, 255])
        body = body[: chance.choice([len(body), len(body), 0, 3, 40, 72, 73])]
        number = chance.choice([1, 1, 1, 0, 77])
        launcher.socket.send(protocol.REQUEST.pack(Request.NETWORK, 9, number, len(body)) + body)
        message = launcher.socket.recv(4096)
        assert protocol.REPLY.unpack_from(message)[0] == 9
    assert launcher.ask(Request.NETWORK, 1, b"")[0] == 1
    assert launcher.leave() == 0
