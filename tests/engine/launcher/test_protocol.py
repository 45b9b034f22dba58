"""The C program, built with sanitizers, against invalid requests and frames.

A sanitizer that finds something ends the process: the launcher's exit code, or a sandbox that is gone
though no frame gave it a reason to.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dutyfree.engine.host import census
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame, Request

ROOT = Path(__file__).parents[3]
ROUNDS = int(os.environ.get("DUTYFREE_FUZZ", "400"))

pytestmark = pytest.mark.native


class Launcher:
    """A minimal client of the launcher."""

    def __init__(self, program: Path) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(100)
        with theirs:
            command = [str(program), "launcher", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._serial = 0
        self._channels: list[socket.socket] = []
        self._root = self.ask(Request.SCRATCH)[0]
        self._usr = self.ask(Request.LAYER, body=b"/usr\0")[0]

    def ask(self, kind: int, number: int = 0, body: bytes = b"") -> tuple[int, list[int]]:
        self._serial += 1
        self.socket.send(protocol.REQUEST.pack(kind, self._serial, number, len(body)) + body)
        while True:
            message, descriptors, _, _ = socket.recv_fds(self.socket, 4096, 4)
            serial, error, value, _ = protocol.REPLY.unpack_from(message)
            if serial == self._serial:
                assert error == 0, (kind, os.strerror(error), message[protocol.REPLY.size :])
                return value, descriptors

    def fill(self) -> None:
        """A root with the mount points of the trees."""
        value, (descriptor,) = self.ask(Request.SCRATCH)
        for name in ("usr", "workspace"):
            os.mkdir(name, dir_fd=descriptor)
        os.symlink("usr/bin", "bin", dir_fd=descriptor)
        os.symlink("usr/lib", "lib", dir_fd=descriptor)
        os.symlink("usr/lib64", "lib64", dir_fd=descriptor)
        os.close(descriptor)
        self._root = value

    def sandbox(self) -> socket.socket:
        trees = (("", (self._root,)), ("usr", (self._usr,)))
        body = protocol.create(0, trees, memory=0, disk=1 << 20, shm=0, pids=100, cpu_quota=0)
        _, (connected, pidfd) = self.ask(Request.CREATE, 0, body)
        os.close(pidfd)
        self._channels.append(channel := socket.socket(fileno=connected))
        channel.settimeout(100)
        kind, _, _, payload = receive(channel)
        assert kind == Frame.READY, payload
        return channel

    def leave(self) -> int:
        for connected in (*self._channels, self.socket):
            connected.close()
        return self.process.wait(60)


@pytest.fixture
def launcher(program: Path) -> Iterator[Launcher]:
    started = Launcher(program)
    started.fill()
    yield started
    assert started.leave() == 0


def exactly(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def receive(channel: socket.socket) -> tuple[int, int, int, bytes]:
    size, kind, flags, identity = protocol.FRAME.unpack(exactly(channel, protocol.FRAME.size))
    return kind, flags, identity, exactly(channel, size)


PING = 0x7FFFFFFF


def answers(channel: socket.socket) -> bool:
    """Whether init still answers; earlier frames are dropped."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        channel.sendall(protocol.frame(Frame.PING, PING))
        while True:
            kind, _, identity, _ = receive(channel)
            if kind == Frame.DONE and identity == PING:
                return True
    return False


def test_numbers_agree() -> None:
    """The C header and the Python module have the same values."""
    text = (ROOT / "src/dutyfree/engine/init/protocol.h").read_text()
    for prefix, names in (
        ("REQUEST", Request),
        ("FRAME", Frame),
        ("CREATE", protocol.CreateFlag),
        ("EXIT", protocol.ExitFlag),
        ("SEARCH", protocol.SearchFlag),
        ("MATCH", protocol.MatchFlag),
        ("WATCH", protocol.WatchFlag),
        ("AWAIT", protocol.AwaitKind),
        ("NETWORK", protocol.NetworkFlag),
        ("RULE", protocol.RuleKind),
    ):
        for member in names:
            found = re.search(rf"\b{prefix}_{member.name} = (\d+)", text)
            assert found is not None, member
            assert int(found[1]) == member.value, member
    for name in ("MOUNTPOINT_MAX", "LAYERS_MAX", "TREES_MAX", "RULES_MAX", "RESOLVERS_MAX", "REQUEST_MAX"):
        assert f"#define {name} {getattr(protocol, name)}\n" in text
    assert f"#define PROTOCOL_VERSION {protocol.VERSION}\n" in text
    text = (ROOT / "src/dutyfree/engine/init/pid1/init.h").read_text()
    assert f"#define PAYLOAD_FD {census.PAYLOAD_FD} " in text


def test_requests_at_random(launcher: Launcher) -> None:
    chance = random.Random(1)
    for _ in range(ROUNDS):
        kind = chance.choice([*Request, 0, 99, 0xFFFFFFFF])
        if kind in (Request.SCRATCH, Request.SLOTS, Request.SWEEP):  # SWEEP would remove the layers
            continue
        body = chance.randbytes(chance.choice([0, 1, 7, 16, 1608, 5000]))
        size = chance.choice([len(body), len(body), 0, 1, 0xFFFFFFFF])
        number = chance.choice([0, 1, 77, 0xFFFFFFFF]) if kind != Request.REMOVE_LAYER else 0xFFFF
        message = protocol.REQUEST.pack(kind, 0xFFFFFFFF, number, size) + body
        launcher.socket.send(message[: chance.choice([len(message), len(message), 1, 15])] or b"x")
        assert len(launcher.socket.recv(4096)) >= protocol.REPLY.size
    assert launcher.ask(Request.HELLO)[0] == protocol.VERSION
    assert answers(launcher.sandbox())


def test_creations_at_random(launcher: Launcher) -> None:
    """Missing layers, mount points outside the root, counts above every limit."""
    chance = random.Random(2)
    sound = protocol.create(0, (("", (1,)),), memory=0, disk=1 << 20, shm=0, pids=0, cpu_quota=0)
    for _ in range(ROUNDS // 8):
        body = bytearray(sound)
        for _ in range(chance.randrange(1, 6)):
            struct.pack_into(
                "=I", body, chance.randrange(0, 400) & ~3, chance.choice([0, 1, 9, 33, 0xFFFFFFFF])
            )
        launcher.socket.send(protocol.REQUEST.pack(Request.CREATE, 5, 0, len(body)) + body)
        message, descriptors, _, _ = socket.recv_fds(launcher.socket, 4096, 4)
        assert protocol.REPLY.unpack_from(message)[0] == 5
        for descriptor in descriptors:
            os.close(descriptor)
    assert answers(launcher.sandbox())


def test_frames_at_random(launcher: Launcher) -> None:
    chance = random.Random(3)
    channel = launcher.sandbox()
    for number in range(1, ROUNDS):
        kind = chance.choice([*Frame, 0, 200, 65535])
        if kind == Frame.PING:
            continue
        payload = chance.randbytes(chance.choice([0, 1, 4, 5, 31, 32, 33, 100, 70_000]))
        if kind in (Frame.READ, Frame.WRITE, Frame.LIST, Frame.REMOVE, Frame.EXEC) and chance.random() < 0.5:
            payload = chance.choice([b"\0\0\0\0", b"", bytes(12)]) + b"/workspace/" + payload[:100]
        flags = chance.choice([0, protocol.WITH_FD, 0x200, 0xFFFF])
        channel.sendall(protocol.FRAME.pack(len(payload), kind, flags, number) + payload)
    assert answers(channel)


def test_commands_at_random(launcher: Launcher) -> None:
    """Argument counts that do not match the strings, and strings without an end."""
    chance = random.Random(4)
    channel = launcher.sandbox()
    for number in range(1, ROUNDS):
        strings = b"".join(
            chance.choice([b"", b"x", b"/bin/true", b"A=B", b"PATH=:"]) + b"\0" for _ in range(6)
        )
        argc, envc = chance.choice([(1, 3), (4, 0), (2, 2), (0, 4), (9, 9), (0xFFFFFFFF, 5), (4, 0xFFFFFFFF)])
        head = protocol.EXEC.pack(
            chance.choice([0, 1, 10**9, 2**64 - 1]),
            chance.choice([0, 1, 2**32 - 1]),
            chance.choice([0, 1, 1000, 2**32 - 1]),
            chance.choice([0, 1, 2**32 - 1]),
            argc,
            envc,
        )
        payload = head + strings[: chance.choice([len(strings), len(strings), 3, 0])]
        channel.sendall(protocol.frame(Frame.EXEC, number, payload))
        if chance.random() < 0.3:
            channel.sendall(protocol.frame(Frame.KILL, chance.randrange(number + 5)))
        if chance.random() < 0.2:
            assert answers(channel)
    assert answers(channel)


def test_frames_in_pieces(launcher: Launcher) -> None:
    """Large and small frames, cut anywhere."""
    chance = random.Random(5)
    channel = launcher.sandbox()
    stream = b""
    for number in range(1, 30):
        data = chance.randbytes(chance.choice([0, 10, 65_500, 65_536, 200_000]))
        payload = protocol.WRITE.pack(0o644) + b"/workspace/file\0" + data
        stream += protocol.frame(Frame.WRITE, number, payload)
    while stream:
        size = chance.choice([1, 3, 11, 12, 13, 4096, 100_000])
        channel.sendall(stream[:size])
        stream = stream[size:]
    for number in range(1, 30):
        kind, _, identity, payload = receive(channel)
        assert (kind, identity, payload) == (Frame.DONE, number, bytes(4))
    assert answers(channel)


def test_a_frame_too_large_ends_only_its_sandbox(launcher: Launcher) -> None:
    one, other = launcher.sandbox(), launcher.sandbox()
    one.sendall(protocol.FRAME.pack(protocol.FRAME_MAX + 1, Frame.READ, 0, 1))
    with pytest.raises(EOFError):
        receive(one)
    assert answers(other)


def test_actions_at_random(launcher: Launcher) -> None:
    """Edits, searches, watches, terminals, and frames that wait for others, with sizes that lie."""
    chance = random.Random(7)
    channel = launcher.sandbox()
    text = b"one\ntwo\nthree\n"
    channel.sendall(protocol.frame(Frame.WRITE, 1, protocol.WRITE.pack(0o644) + b"/workspace/f\0" + text))
    lies = (0, 1, 3, 4, 100, 2**31, 2**32 - 1)
    number = 1
    for _ in range(ROUNDS):
        number += 1
        path = chance.choice([b"/workspace/f\0", b"f\0", b"/workspace\0", b".\0", b"/nowhere\0", b"\0", b"x"])
        words = b"".join(
            chance.choice([b"o", b"*.py", b"[", b"(a|b)*c", b"\\", b""]) + b"\0" for _ in range(4)
        )
        payloads = {
            Frame.EDIT: protocol.EDIT.pack(chance.choice(lies), chance.choice(lies)) + path + b"two",
            Frame.SEARCH: protocol.SEARCH.pack(
                chance.choice([0, 1, 10**7]),
                chance.randrange(16),
                chance.choice(lies),
                chance.choice(lies),
                chance.choice((0, 1, 2, 3, 400, 2**32 - 1)),
                chance.choice((0, 1, 2, 2**32 - 1)),
                0,
            )
            + path
            + words,
            Frame.WATCH: protocol.WATCH.pack(chance.randrange(4), chance.choice(lies)) + path,
            Frame.TERMINAL: protocol.WINDOW.pack(chance.randrange(3), 80)
            + protocol.EXEC.pack(10**8, 0, 0, 1, chance.choice((0, 1, 2)), 0)
            + chance.choice([b"\0\0/bin/true\0", b"nobody\0/\0/bin/true\0", b"\0", b""]),
            Frame.SIGNAL_COMMAND: chance.choice([b"", struct.pack("=I", chance.choice((0, 9, 15, 99)))]),
            Frame.POSTPONE: chance.choice([b"", struct.pack("=Q", chance.choice((0, 5, 2**64 - 1)))]),
            Frame.READ: path,
        }
        kind, payload = chance.choice([*payloads.items()])
        cut = chance.choice([len(payload)] * 4 + [0, 1, 9])
        flags = chance.choice([0, 0, protocol.AFTER, protocol.AFTER | protocol.IF_OK, 0xFEFF])
        channel.sendall(protocol.FRAME.pack(len(payload[:cut]), kind, flags, number) + payload[:cut])
        if chance.random() < 0.3:
            flags = chance.choice([0, protocol.AFTER])
            channel.sendall(protocol.frame(Frame.KILL, chance.randrange(number + 3), flags=flags))
        if chance.random() < 0.2:
            assert answers(channel)
        for watch in range(max(1, number - 20), number):  # watches never end by themselves
            channel.sendall(protocol.frame(Frame.KILL, watch))
    assert answers(channel)


def test_a_long_chain_of_frames(launcher: Launcher) -> None:
    """Frames above the limit of waiting ones are refused, each with its own answer, and none is lost."""
    channel = launcher.sandbox()
    strings = b"\0\0/usr/bin/sleep\0000.5\0"
    channel.sendall(protocol.frame(Frame.EXEC, 1, protocol.EXEC.pack(0, 0, 0, 0, 2, 0) + strings))
    count = 5000
    frames = b"".join(
        protocol.frame(Frame.READ, number, b"/nowhere\0", protocol.AFTER) for number in range(2, count + 2)
    )
    channel.sendall(frames)
    seen: set[int] = set()
    while len(seen) <= count:
        kind, _, identity, _ = receive(channel)
        assert kind in (Frame.EXIT, Frame.DONE)
        assert identity not in seen
        seen.add(identity)
    assert answers(channel)


def test_archives_at_random(launcher: Launcher) -> None:
    chance = random.Random(6)
    channel = launcher.sandbox()
    for number in range(1, ROUNDS // 4):
        archive = b""
        for _ in range(chance.randrange(4)):
            name = chance.choice([b"", b"a", b"../../x", b"a/b", b"x" * 300, b"\0"])
            mode = chance.choice([0o100644, 0o040755, 0o120777, 0o010644, 0xFFFFFFFF])
            size = chance.choice([0, 3, 5000, 2**63])
            length = chance.choice([len(name), len(name), 5000, 0xFFFFFFFF])
            archive += protocol.MEMBER.pack(size, mode, length) + name + bytes(min(size, 5000))
        reading, writing = os.pipe()
        os.write(writing, (archive + protocol.MEMBER.pack(0, 0, 0))[: chance.choice([10, 60_000])])
        os.close(writing)
        payload = b"/workspace/tree\0"
        frame = protocol.FRAME.pack(len(payload), Frame.UNPACK, protocol.WITH_FD, number) + payload
        socket.send_fds(channel, [frame], [reading])
        os.close(reading)
        kind, _, identity, _ = receive(channel)
        assert (kind, identity) == (Frame.DONE, number)
    assert answers(channel)
