"""Seeds of the fuzzers: valid input of every kind, built with the engine's own protocol module."""

from __future__ import annotations

import struct
from pathlib import Path

from dutyfree.engine.launcher import network_policy, protocol
from dutyfree.engine.launcher.protocol import AwaitKind, CreateFlag, Frame, Request, SearchFlag, WatchFlag

SIZE = struct.Struct("=H")
REQUEST, EGRESS, ENDED, FROZEN = range(4)


def write(directory: Path) -> None:
    """Write one directory of seeds for each target."""
    for target, found in _all().items():
        place = directory / target
        place.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(found):
            (place / f"seed-{number}").write_bytes(data)


def _all() -> dict[str, list[bytes]]:
    return {
        "accounts": _accounts(),
        "tree_streams": _tree_streams(),
        "cgroups": _cgroups(),
        "names": _names(),
        "frames": _frames(),
        "requests": _requests(),
        "policies": _policies(),
        "searches": [SIZE.pack(len(payload)) + payload + b"one\nTwo\nthree\n" for payload in _searches()],
    }


def _accounts() -> list[bytes]:
    passwd = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n1000:x:7:8\n"
    passwd += b"last:x:4294967295:4294967295\n"
    group = b"root:x:0:\nstaff:x:50:nobody,root\n1000:100000:65536\nroot:1:2\n"
    maps = b"         0          0 4294967295\n0 1000 1\n1 100000 65536\n"
    users = (b"root", b"nobody:staff", b"1000", b"1000:50", b"nobody:", b"missing", b":staff", b"last")
    return [b"\0".join((user, passwd, text, b"")) for user in users for text in (group, maps)]


def _tree_streams() -> list[bytes]:
    def member(path: bytes, mode: int, data: bytes = b"") -> bytes:
        return protocol.MEMBER.pack(len(data), mode, len(path)) + path + data

    end = protocol.MEMBER.pack(0, 0, 0)
    tree = member(b"", 0o040755) + member(b"a", 0o040700) + member(b"a/b", 0o100755, b"text")
    return [
        end,
        member(b"", 0o100644, b"one file") + end,
        member(b"", 0o120777, b"target") + end,
        tree + member(b"a/link", 0o120777, b"b") + member(b"a/link", 0o100644, b"instead") + end,
        tree + member(b"a", 0o100644) + member(b"../x", 0o100600, b"x") + member(b"pipe", 0o010644) + end,
    ]


def _cgroups() -> list[bytes]:
    kinds = ("cpu,cpuacct", "memory", "pids")
    first = "".join(f"3{i} 25 0:2{i} / v1 rw - cgroup cgroup rw,{kind}\n" for i, kind in enumerate(kinds))
    places = "".join(f"{i}:{kind}:/ours\n" for i, kind in enumerate(kinds))
    second = "42 24 0:26 / v2 rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    within = "42 24 0:26 /docker/abc v2 rw,nosuid - cgroup2 cgroup2 rw\n"
    return [
        f"{mounts}\0{groups}".encode()
        for mounts, groups in (
            (first, places),
            (first + second, places + "0::/ours\n"),
            (second, "0::/ours\n"),
            (second, "0::/../outside\n"),
            (within, "0::/docker/abc/ours\n"),
            (within, "0::/docker/abcd\n"),
            (within.replace("/docker", "docker"), "0::docker/abcd\n"),
            ("24 1 8:1 / / rw - ext4 /dev/vda rw\n" + second, "0::/\n"),
        )
    ]


def _names() -> list[bytes]:
    name = b"\3www\7Example\4test\0"
    asked = b"\x12\x34\1\0\0\1\0\0\0\0\0\0" + name + b"\0\1\0\1"
    extended = asked[:11] + b"\1" + asked[12:] + b"\0\0\x29\4\xd0\0\0\0\0\0\0"
    record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 300, 4) + b"\x0a\1\2\3"
    record6 = name + struct.pack(">HHIH", 28, 1, 300, 16) + bytes(range(16))
    answer = b"\x12\x34\x81\x80\0\1\0\2\0\0\0\0" + name + b"\0\1\0\1" + record + record6
    long = asked[:12] + (b"\x3e" + b"a" * 62) * 4 + b"\0\0\1\0\1"
    return [SIZE.pack(len(question)) + question + answer for question in (asked, extended, long)]


def _policies() -> list[bytes]:
    resolvers = network_policy.parse_resolvers(["127.0.0.1", "::1"])
    bodies = [
        network_policy.encode("on", resolvers),
        network_policy.encode(("example.org:443", "*.example.test", "10.0.0.0/8", "host:80"), resolvers),
        network_policy.encode(("*", "2001:db8::/33"), []),
    ]
    address = bytes(10) + b"\xff\xff\x0a\1\2\3"
    return [
        SIZE.pack(len(body)) + struct.pack("=H16s", port, address) + body + name
        for body in bodies
        for port, name in ((443, b"example.org"), (80, b"www.example.test"), (53, b""))
    ]


def _searches() -> list[bytes]:
    def search(flags: int, root: bytes, pattern: bytes, names: list[bytes], skipped: list[bytes]) -> bytes:
        head = protocol.SEARCH.pack(10**9, flags, 100, 20, len(names), len(skipped), 0)
        return head + b"".join(word + b"\0" for word in (root, pattern, *names, *skipped))

    return [
        search(0, b".", b"two", [], []),
        search(0, b".", b"", [b"*.py"], [b"inner"]),
        search(0, b".", b"", [], []),
        search(0, b"text", b"one", [], []),
        search(SearchFlag.REGEX, b".", b"^t(wo|h.*)$", [b"inner/*"], []),
        search(SearchFlag.NOCASE | SearchFlag.BINARY, b".", b"TWO", [], [b".git"]),
        search(SearchFlag.REGEX, b"inner", b"(", [], []),
    ]


def _frames() -> list[bytes]:
    """Each kind alone, then many in one stream, whole and in pieces. frames.c explains the first bytes."""
    strings = b"root\0/\0echo\0hello\0A=B\0PATH=/bin\0"
    command = protocol.EXEC.pack(10**9, 100, 50, 0, 2, 2) + strings
    streamed = protocol.EXEC.pack(0, 4, 0, protocol.EXEC_STREAM, 2, 2) + strings
    number = protocol.NUMBER.pack
    frames = [
        protocol.frame(Frame.EXEC, 1, command),
        protocol.frame(Frame.EXEC, 2, streamed),
        protocol.frame(Frame.EXEC, 3, command.replace(b"echo", b"!ech")),
        protocol.frame(Frame.CREDIT, 2, number(1000)),
        protocol.frame(Frame.KILL, 1),
        protocol.frame(Frame.KILL, 2, flags=protocol.SPARE),
        protocol.frame(Frame.READ, 4, b"f\0"),
        protocol.frame(Frame.READ, 5, b"large\0"),
        protocol.frame(Frame.WRITE, 6, protocol.WRITE.pack(0o644) + b"new/file\0" + b"text"),
        protocol.frame(Frame.WRITE, 7, protocol.WRITE.pack(0o755) + b"g\0", protocol.WITH_FD),
        protocol.frame(Frame.LIST, 8, b".\0"),
        protocol.frame(Frame.REMOVE, 9, b"link\0"),
        protocol.frame(Frame.REMOVE, 10, b"d\0"),
        protocol.frame(Frame.UNPACK, 11, b"tree\0", protocol.WITH_FD),
        protocol.frame(Frame.PACK, 12, b"f\0", protocol.WITH_FD),
        protocol.frame(Frame.SIGNAL_ALL, 13, number(9)),
        protocol.frame(Frame.PING, 14),
        protocol.frame(Frame.TERMINAL, 15, protocol.WINDOW.pack(24, 80) + command),
        protocol.frame(Frame.EDIT, 16, protocol.EDIT.pack(3, 4) + b"f\0" + b"two" + b"zwei"),
        protocol.frame(Frame.EDIT, 17, protocol.EDIT.pack(1, 0) + b"link\0" + b"e"),
        *(protocol.frame(Frame.SEARCH, 20 + i, payload) for i, payload in enumerate(_searches())),
        protocol.frame(Frame.WATCH, 30, protocol.WATCH.pack(WatchFlag.RECURSIVE, 100) + b".\0"),
        protocol.frame(Frame.SIGNAL_COMMAND, 1, number(15)),
        protocol.frame(Frame.POSTPONE, 0, protocol.NANOSECONDS.pack(10**9)),
        protocol.frame(Frame.VERIFY, 60, protocol.NUMBER.pack(1)),
        protocol.frame(Frame.BACKGROUND, 0, protocol.NUMBER.pack(1)),
        protocol.frame(Frame.SERVICE, 40, streamed),
        protocol.frame(Frame.CALL, 41, protocol.CALL_REQUEST.pack(40) + command),
        protocol.frame(Frame.CALL, 42, protocol.CALL_REQUEST.pack(40) + command, protocol.WITH_FD),
        protocol.frame(Frame.KILL, 42),
        protocol.frame(Frame.CALL, 43, protocol.CALL_REQUEST.pack(1) + command),
        protocol.frame(Frame.AWAIT, 44, protocol.AWAIT_REQUEST.pack(AwaitKind.FILE) + b"f\0"),
        protocol.frame(Frame.AWAIT, 45, protocol.AWAIT_REQUEST.pack(AwaitKind.SOCKET) + b"s\0"),
    ]
    chained = [
        frame[:6] + SIZE.pack(SIZE.unpack_from(frame, 6)[0] | protocol.AFTER | flags) + frame[8:]
        for frame in frames
        for flags in (0, protocol.IF_OK)
    ]
    fed = [
        protocol.frame(Frame.EXEC, 50, command, protocol.WITH_INPUT),
        protocol.frame(Frame.INPUT, 50, b"text"),
        protocol.frame(Frame.WRITE, 51, protocol.WRITE.pack(0o644) + b"h\0", protocol.WITH_INPUT),
        protocol.frame(Frame.INPUT, 51, b"x" * 1000),
        protocol.frame(Frame.INPUT, 51),
        protocol.frame(Frame.INPUT, 50),
        protocol.frame(Frame.UNPACK, 52, b"tree\0", protocol.WITH_INPUT),
        protocol.frame(Frame.INPUT, 52, b"x" * 1000),
        protocol.frame(Frame.EXEC, 53, command, protocol.WITH_INPUT | protocol.AFTER),
        protocol.frame(Frame.INPUT, 53, b"x" * 2000),
        protocol.frame(Frame.PACK, 54, b"d\0"),
        protocol.frame(Frame.INPUT, 55, b"of no request"),
    ]
    start = frames[0]
    return [
        *(b"\0\0\2" + fed[0] + frame for frame in fed[1:]),
        b"\0\0\3" + b"".join(fed + frames),
        b"\0\1\2" + b"".join(fed + frames),
        *(b"\1\0\0" + frame for frame in frames),
        *(b"\1\0\1" + start + frame + frames[4] for frame in chained),
        b"\3\0\0" + b"".join(frames),
        b"\3\1\1" + b"".join(frames),
        b"\3\2\0" + start + b"".join(chained),
        b"\0\0\0" + protocol.FRAME.pack(protocol.FRAME_MAX + 1, Frame.READ, 0, 1),
        b"\0\0\0" + protocol.FRAME.pack(1 << 20, Frame.READ, 0, 1) + b"x" * 100,
    ]


def _requests() -> list[bytes]:
    def event(what: int, data: bytes) -> bytes:
        return bytes([what]) + SIZE.pack(len(data)) + data

    def request(kind: int, number: int = 0, body: bytes = b"") -> bytes:
        return event(REQUEST, protocol.REQUEST.pack(kind, 7, number, len(body)) + body)

    def create(flags: int, memory: int = 0) -> bytes:
        trees = (("", (1, 2)), ("usr", (3,)))
        body = protocol.create(flags, trees, memory=memory, disk=1 << 20, shm=0, pids=100, cpu_quota=0)
        return request(Request.CREATE, 0, body + protocol.label(1, "image"))

    ended, frozen = event(ENDED, protocol.NUMBER.pack(1)), event(FROZEN, protocol.NUMBER.pack(1))
    allowed = network_policy.encode(
        ("example.org:443", "host"), network_policy.parse_resolvers(["127.0.0.1"])
    )
    opened = request(Request.NETWORK, 1, allowed)
    said = event(EGRESS, protocol.REPLY.pack(7, 0, 1, 0))
    port = request(Request.CONNECT, 1, protocol.PORT.pack(80, 0))
    freeze, thaw = request(Request.FREEZE, 1), request(Request.THAW, 1)
    simple = (Request.HELLO, Request.SCRATCH, Request.PROBE)
    return [
        *(request(kind) for kind in simple),
        request(Request.LAYER, 0, b"/usr\0") + request(Request.REMOVE_LAYER, 1),
        request(Request.SLOTS, 3) + create(0) + request(Request.DESTROY, 1) + ended,
        create(0) + request(Request.SNAPSHOT_MOVE, 1, b"\1") + request(Request.DESTROY, 1) + ended,
        create(0)
        + request(Request.SNAPSHOT_MOVE, 1)
        + request(Request.SNAPSHOT_COPY, 1)
        + ended
        + request(Request.SNAPSHOT_COPY, 1),
        request(Request.MERGE, 0, protocol.merge([1], [2])) + request(Request.MERGE, 0, b"\1\0\0\0"),
        create(0, memory=1) + create(CreateFlag.SHARED_NETWORK),
        (create(CreateFlag.DISK) + request(Request.SNAPSHOT_COPY, 1)) * 3 + ended,
        request(Request.DISK) + request(Request.TEMPLATE, 0, protocol.DISK_LIMIT.pack(1 << 20)),
        create(0) + request(Request.AUDIT, 1) * 6 + ended + request(Request.AUDIT, 1),
        create(0) + freeze + freeze + frozen + thaw + freeze + ended,
        create(0) + opened + said + opened + said + request(Request.NETWORK, 1) + said + port + ended,
        create(0) + opened + ended + said + create(0) + event(EGRESS, b"\1\2\3"),
    ]
