"""Kernel resources that no limit counts: a sandbox gets a bounded part, or none."""

from __future__ import annotations

import ctypes
import os
import textwrap
from pathlib import Path

import anyio
import pytest

from dutyfree import Limits
from dutyfree.contract import Sandbox, Substrate

pytestmark = [pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")]

LIMITS = Limits(memory=512 << 20)
PRELUDE = """
import ctypes, errno, os, socket, struct, time
libc = ctypes.CDLL(None, use_errno=True)
def name(error): return errno.errorcode[error.errno]
def call(*arguments):
    if libc.syscall(*arguments) < 0: raise OSError(ctypes.get_errno(), "")
def attempt(what, *arguments):
    try: what(*arguments); return "done"
    except OSError as error: return name(error)
"""


async def python(sandbox: Sandbox, script: str) -> list[str]:
    seen = await sandbox.exec(["python3", "-c", PRELUDE + textwrap.dedent(script)], timeout=100)
    assert seen.ok, seen.stderr.decode()
    return seen.stdout.decode().split()


async def test_connections_that_nobody_accepts(native: Substrate) -> None:
    """Neither their memory nor queued data is charged to anyone, also after the sender is gone."""
    script = """
    servers, made = [], 0
    def connect():
        with socket.create_connection(servers[-1].getsockname()) as ours:
            ours.send(bytes(4096))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    def serve(): servers.append(socket.create_server(("127.0.0.1", 0), backlog=1024))
    try:
        while made < 20_000:
            if made % 1000 == 0: serve()
            connect(); made += 1
        print("done", made)
    except OSError as error: print(name(error), made)
    for server in servers: server.close()
    serve()
    while attempt(connect) != "done": time.sleep(0.01)
    print("again")
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        refusal, made, again = await python(sandbox, script)
    assert (refusal, again) == ("ENOBUFS", "again")
    assert 1024 < int(made) < 8192


async def test_a_connection_by_sending(native: Substrate) -> None:
    """It would not be counted."""
    script = """
    server = socket.create_server(("127.0.0.1", 0))
    server.setsockopt(socket.IPPROTO_TCP, 23, 5)
    ours = socket.socket()
    print(attempt(ours.sendto, b"early", 0x20000000, server.getsockname()))
    print(attempt(ours.setsockopt, 6, 30, 1))
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert await python(sandbox, script) == ["ENOTSUP", "ENOTSUP"]


REFUSED = """
import ctypes
header = struct.pack("=QIIi4x", 20, 41, 52, 64)
group = struct.pack("=I4xHHI16s104x", 1, socket.AF_INET6, 0, 0, socket.inet_pton(socket.AF_INET6, "ff02::99"))
key = struct.pack("=HH4s120xBBHI80s", socket.AF_INET, 0, bytes([10, 0, 0, 1]), 0, 0, 8, 0, bytes(80))
label = struct.pack("=15xBIBBHHHI", 1, 0, 0, 255, 1, 9, 9, 0)
step = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0xFFFF), 8)
program = struct.pack("@HP", 1, ctypes.addressof(step))
tried = {
    "IPV6_2292PKTOPTIONS": (41, 6, header * 2600),
    "IPV6_HOPOPTS": (41, 54, bytes([0, 255]) + bytes(2046)),
    "IPV6_RTHDRDSTOPTS": (41, 55, bytes([0, 255]) + bytes(2046)),
    "IPV6_RTHDR": (41, 57, bytes([0, 2, 2, 1]) + bytes(20)),
    "IPV6_DSTOPTS": (41, 59, bytes([0, 255]) + bytes(2046)),
    "IPV6_ADD_MEMBERSHIP": (41, 20, socket.inet_pton(socket.AF_INET6, "ff02::99") + struct.pack("=I", 1)),
    "IPV6_JOIN_ANYCAST": (41, 27, socket.inet_pton(socket.AF_INET6, "fd00::") + struct.pack("=I", 1)),
    "IPV6_FLOWLABEL_MGR": (41, 32, label),
    "IPV6 MCAST_JOIN_GROUP": (41, 42, group),
    "IPV6 MCAST_MSFILTER": (41, 48, bytes(264)),
    "IP_OPTIONS": (0, 4, bytes([1] * 40)),
    "IP_ADD_MEMBERSHIP": (0, 35, bytes([239, 1, 1, 1, 127, 0, 0, 1])),
    "IP_ADD_SOURCE_MEMBERSHIP": (0, 39, bytes([239, 1, 1, 1, 127, 0, 0, 1, 127, 0, 0, 2])),
    "IP_MSFILTER": (0, 41, bytes(16)),
    "IP MCAST_JOIN_GROUP": (0, 42, struct.pack("=I4xHH4s120x", 1, socket.AF_INET, 0, bytes([239, 1, 1, 1]))),
    "TCP_MD5SIG": (6, 14, key),
    "TCP_MD5SIG_EXT": (6, 32, key),
    "TCP_REPAIR": (6, 19, 1),
    "TCP_SAVE_SYN": (6, 27, 1),
    "TCP_ULP": (6, 31, b"tls"),
    "TCP_FASTOPEN_KEY": (6, 33, bytes(16)),
    "TCP_TX_DELAY": (6, 37, 1000),
    "TCP_AO_ADD_KEY": (6, 38, bytes(200)),
    "SO_RCVLOWAT": (1, 18, 1 << 20),
    "SO_ATTACH_FILTER": (1, 26, program),
    "SO_RCVBUFFORCE": (1, 33, 1 << 30),
    "SO_TIMESTAMPING": (1, 37, 1 << 9),
    "SO_ATTACH_BPF": (1, 50, 0),
    "SO_ATTACH_REUSEPORT_CBPF": (1, 51, program),
    "SO_ZEROCOPY": (1, 60, 1),
    "SO_TIMESTAMPING_NEW": (1, 65, 1 << 9),
    "SO_BUF_LOCK": (1, 72, 0),
    "SO_RESERVE_MEM": (1, 73, 1 << 20),
    "an option beyond all": (1, 1 << 20, 1),
    "an option below all": (1, -8, 1),
    "a level that wraps": (1 << 30 | 41, 6, header),
    "a level that nobody knows": (99, 1, 1),
}
for kind in ((socket.AF_INET6, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_STREAM),
             (socket.AF_INET6, socket.SOCK_DGRAM), (socket.AF_UNIX, socket.SOCK_STREAM)):
    with socket.socket(*kind) as made:
        for what, arguments in tried.items():
            answer = attempt(made.setsockopt, *arguments)
            if answer not in ("ENOPROTOOPT", "ENOTSUP" if kind[0] == socket.AF_UNIX else ""):
                print(what.replace(" ", "_"), kind[0].name, answer)
with socket.socket() as made:
    print("TCP_ZEROCOPY_RECEIVE", attempt(made.getsockopt, 6, 35, 64))
"""


async def test_options_that_would_hold_memory_or_change_the_host(native: Substrate) -> None:
    """Most of them keep up to 128 KiB per socket, which no limit of a sandbox counts."""
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert await python(sandbox, REFUSED) == ["TCP_ZEROCOPY_RECEIVE", "ENOPROTOOPT"]


COMMON = """
four, six, stream, datagrams = socket.AF_INET, socket.AF_INET6, socket.SOCK_STREAM, socket.SOCK_DGRAM
on = 1
cases = [
    (four, stream, 1, [(2, on), (5, on), (7, 65536), (9, on), (10, on), (12, 3), (15, on), (29, on)]),
    (four, stream, 6, [(1, on), (2, 1000), (3, on), (4, 60), (5, 10), (6, 5), (7, 3), (8, 9), (9, 5),
                       (12, on), (18, 9000), (23, 5), (25, 16384), (36, on)]),
    (four, stream, 0, [(1, 16), (2, 60), (10, 2), (11, on), (12, on), (13, on), (15, on), (21, 2), (24, on)]),
    (four, datagrams, 0, [(8, on), (20, on), (33, 4), (34, on), (49, on)]),
    (four, datagrams, 1, [(6, on), (29, on), (35, on), (40, on)]),
    (four, datagrams, 17, [(1, on), (103, 1200), (104, on)]),
    (six, stream, 41, [(16, 60), (25, on), (26, on), (66, on), (67, 16), (70, on), (72, 2)]),
    (six, datagrams, 41, [(18, 4), (19, on), (23, 2), (49, on), (51, on), (53, on), (56, on), (58, on),
                           (60, on), (62, on)]),
    (socket.AF_UNIX, stream, 1, [(16, on), (76, on)]),
    (socket.AF_NETLINK, socket.SOCK_RAW, 270, [(1, 1), (3, on), (10, on), (11, on), (12, on)]),
]
for family, kind, level, options in cases:
    for option, value in options:
        with socket.socket(family, kind) as made:
            answer = attempt(made.setsockopt, level, option, value)
            if answer != "done": print(family.name, level, option, answer)
with socket.socket() as made:
    made.setsockopt(1, 13, struct.pack("ii", 1, 5)); made.setsockopt(1, 20, struct.pack("ll", 5, 0))
    made.setsockopt(1, 25, b"lo"); made.setsockopt(6, 13, b"reno")
    made.setsockopt(6, 1, 1); made.setsockopt(1, 8, 1 << 20)
    print(made.getsockopt(6, 1), made.getsockopt(6, 13, 16)[:4].decode(), made.getsockopt(1, 8) < 1 << 20)
"""


async def test_options_that_programs_use(native: Substrate) -> None:
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert await python(sandbox, COMMON) == ["1", "reno", "True"]


async def test_protocols_that_the_kernel_might_load(native: Substrate) -> None:
    script = """
    inet, stream, datagrams = socket.AF_INET, socket.SOCK_STREAM, socket.SOCK_DGRAM
    for kind, protocol in ((5, 132), (6, 33), (datagrams, 115), (stream, 132), (stream, 262)):
        print(attempt(socket.socket, inet, kind, protocol))
    for kind, protocol in ((stream, 0), (stream, 6), (datagrams, 17), (datagrams, 1), (datagrams, 136)):
        print(attempt(socket.socket, inet, kind, protocol))
    print(attempt(socket.socket, inet, socket.SOCK_RAW, 1))
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert await python(sandbox, script) == ["EPROTONOSUPPORT"] * 5 + ["done"] * 5 + ["EPERM"]


async def test_access_lists(native: Substrate) -> None:
    script = """
    def entry(tag, rights, user=-1): return struct.pack("=HHi", tag, rights, user)
    def acl(users):
        named = b"".join(entry(2, 7, user + 1) for user in range(users))
        return struct.pack("=I", 2) + entry(1, 7) + named + entry(4, 5) + entry(16, 7) + entry(32, 5)
    open("file", "w").close()
    for users in (3, 100, 200, 8000):
        print(attempt(os.setxattr, "file", "system.posix_acl_access", acl(users)))
    large = ctypes.create_string_buffer(acl(200))
    file = os.open("file", os.O_RDWR)
    print(attempt(os.setxattr, file, "system.posix_acl_access", large.raw[:-1]))
    print(attempt(call, 189, b"file", b"system.posix_acl_access", large, len(large) - 1, 0))
    print(attempt(call, 463, -100, b"file", 0, b"system.posix_acl_access", bytes(16), 16))
    print(attempt(os.setxattr, "file", "user.note", bytes(1024)))
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        refused = ["E2BIG", "E2BIG", "E2BIG", "E2BIG", "ENOSYS"]
        assert await python(sandbox, script) == ["done", "done", *refused, "done"]


FILTERS = """
import threading
libc.prctl(38, 1, 0, 0, 0)
allow = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000), 8)
program = ctypes.create_string_buffer(struct.pack("@HP", 1, ctypes.addressof(allow)), 16)
def put(): print(attempt(call, 317, 1, 0, program), attempt(call, 157, 22, 2, program))
put()
threading.stack_size(65536)
ended = threading.Event()
for _ in range({threads}): threading.Thread(target=ended.wait).start()
put()
ended.set()
"""


@pytest.mark.parametrize(("threads", "answer"), [(200, "done"), (300, "EAGAIN")])
async def test_filters_on_system_calls(native: Substrate, threads: int, answer: str) -> None:
    """The kernel has a limit for the whole host, and one for each task."""
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert await python(sandbox, FILTERS.format(threads=threads)) == ["done", "done", answer, answer]


async def test_large_pages_and_pages_out_of_the_kernels_map(native: Substrate) -> None:
    script = """
    import mmap
    print(attempt(mmap.mmap, -1, 2 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000))
    print(attempt(os.memfd_create, "large", 4), attempt(os.memfd_create, "small", 1), attempt(call, 447, 0))
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert await python(sandbox, script) == ["ENOMEM", "ENOMEM", "done", "ENOSYS"]


EVICT = """
import mmap
libc.mmap.restype = ctypes.c_void_p
programs = (found for found in os.scandir("/usr/bin") if found.is_file() and "python" not in found.name)
file = os.open(next(found for found in programs if 1 << 20 < found.stat().st_size < 16 << 20), os.O_RDONLY)
size = os.fstat(file).st_size
while os.read(file, 1 << 20): pass
print(attempt(os.posix_fadvise, file, 0, 0, os.POSIX_FADV_DONTNEED))
at = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(size), 1, 1, file, ctypes.c_long(0)))
ctypes.string_at(at, size)
print(attempt(call, 28, at, ctypes.c_size_t(size), 21), attempt(call, 440, 0, 0, 0, 21, 0))
print(os.readlink(f"/proc/self/fd/{file}"))
"""


async def test_files_of_the_image_stay_in_memory(native: Substrate) -> None:
    """A sandbox that evicts them makes the disk read them again, for all others too."""
    async with native.sandbox(limits=LIMITS) as sandbox:
        *answers, path = await python(sandbox, EVICT)
    assert answers == ["done", "EINVAL", "ENOSYS"]
    size = (await anyio.Path(path).stat()).st_size
    assert (await anyio.to_thread.run_sync(in_memory, Path(path)))[0] == -(-size // os.sysconf("SC_PAGESIZE"))


def in_memory(path: Path) -> tuple[int, int]:
    """How many pages of a file are in memory, and how many of them are dirty."""
    found = (ctypes.c_uint64 * 5)()
    with path.open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).syscall(451, file.fileno(), bytes(16), found, 0):
            pytest.skip(f"the kernel does not tell ({os.strerror(ctypes.get_errno())}), before Linux 6.5")
    return int(found[0]), int(found[1])


def unwritten(path: Path) -> int:
    """How much of a file is dirty."""
    return in_memory(path)[1] * os.sysconf("SC_PAGESIZE")


async def test_what_others_have_read(native: Substrate) -> None:
    """Sandboxes share an image's files in the page cache: its content would show what a neighbour did."""
    script = """
    file = os.open("/usr/bin/env", os.O_RDONLY)
    libc.mmap.restype = ctypes.c_void_p
    at = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(4096), 1, 1, file, ctypes.c_long(0)))
    room = ctypes.create_string_buffer(64)
    print(attempt(call, 27, at, ctypes.c_size_t(4096), room), attempt(call, 451, file, bytes(16), room, 0))
    print(*[attempt(os.preadv, file, [bytearray(9)], 0, flags) for flags in (os.RWF_NOWAIT, 0)])
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert await python(sandbox, script) == ["ENOSYS", "ENOSYS", "ENOTSUP", "done"]


async def test_writing_out_the_hosts_disks(native: Substrate, tmp_path: Path) -> None:
    """`sync` in a sandbox does not wait for the disk: it must not flush the writes of others."""

    def write(number: int) -> int:
        (tmp_path / str(number)).write_bytes(os.urandom(16 << 20))
        return unwritten(tmp_path / str(number))

    async with native.sandbox(limits=LIMITS) as sandbox:
        for number in range(10):  # the kernel, or any other process, may flush it
            if not await anyio.to_thread.run_sync(write, number):
                pytest.skip("what is written to the temporary directory goes to no disk")
            assert await python(sandbox, "os.sync(); print('done')") == ["done"]
            if await anyio.to_thread.run_sync(unwritten, tmp_path / str(number)) > 8 << 20:
                return
    raise AssertionError("each time it was written out")


async def test_locks_of_the_host(native: Substrate) -> None:
    """While the kernel lists locks, no process can lock a file."""
    async with native.sandbox(limits=LIMITS) as sandbox:
        script = """
        import fcntl
        file = open("locked", "w")
        fcntl.lockf(file, fcntl.LOCK_EX)
        print(len(open("/proc/locks").read()))
        """
        assert await python(sandbox, script) == ["0"]
