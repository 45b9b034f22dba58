"""What the kernel counts for nobody, or gives to whoever comes first: a sandbox gets a part, or none."""

from __future__ import annotations

import ctypes
import os
import textwrap
from pathlib import Path

import anyio
import pytest

from dutyfree import Limits
from dutyfree.contract import Sandbox, Substrate

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64"),
]

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
    """Neither their memory nor what was sent to them is charged to anybody, also when the sender is gone."""
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
    """Would be one that nobody counts."""
    script = """
    server = socket.create_server(("127.0.0.1", 0))
    server.setsockopt(socket.IPPROTO_TCP, 23, 5)
    ours = socket.socket()
    print(attempt(ours.sendto, b"early", 0x20000000, server.getsockname()))
    print(attempt(ours.setsockopt, 6, 30, 1))
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert await python(sandbox, script) == ["ENOTSUP", "ENOTSUP"]


async def test_options_of_sockets(native: Substrate) -> None:
    script = """
    key = struct.pack("=HH4s120xBBHI80s", socket.AF_INET, 0, bytes([10, 0, 0, 1]), 0, 0, 8, 0, bytes(80))
    label = struct.pack("=15xBIBBHHHI", 1, 0, 0, 255, 1, 9, 9, 0)
    with socket.socket() as four:
        print(attempt(four.setsockopt, 6, 14, key), attempt(four.setsockopt, 6, 32, key))
        print(attempt(four.setsockopt, 6, socket.TCP_NODELAY, 1), four.getsockopt(6, socket.TCP_NODELAY))
    with socket.socket(socket.AF_INET6) as six:
        print(attempt(six.setsockopt, 41, 32, label), attempt(six.setsockopt, 41, socket.IPV6_V6ONLY, 1))
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert await python(sandbox, script) == ["EPERM", "EPERM", "done", "1", "EPERM", "done"]


async def test_protocols_that_the_kernel_might_load(native: Substrate) -> None:
    script = """
    inet, stream, datagrams = socket.AF_INET, socket.SOCK_STREAM, socket.SOCK_DGRAM
    for kind, protocol in ((5, 132), (6, 33), (datagrams, 115), (stream, 132)):
        print(attempt(socket.socket, inet, kind, protocol))
    for kind, protocol in ((stream, 0), (stream, 6), (datagrams, 17), (datagrams, 1), (datagrams, 136)):
        print(attempt(socket.socket, inet, kind, protocol))
    print(attempt(socket.socket, inet, socket.SOCK_RAW, 1))
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert await python(sandbox, script) == ["EPROTONOSUPPORT"] * 4 + ["done"] * 5 + ["EPERM"]


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
    """The kernel has room for so many on the whole host, and allows so many to one task."""
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
present = (ctypes.c_ubyte * ((size + 4095) // 4096))()
call(27, at, ctypes.c_size_t(size), present)
print(all(page & 1 for page in present))
"""


async def test_files_of_the_image_stay_in_memory(native: Substrate) -> None:
    """A sandbox that throws them out has the disk read them again, for all others too."""
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert await python(sandbox, EVICT) == ["done", "EINVAL", "ENOSYS", "True"]


def unwritten(path: Path) -> int:
    """How much of a file is in memory alone."""
    found = (ctypes.c_uint64 * 5)()
    with path.open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).syscall(451, file.fileno(), bytes(16), found, 0):
            pytest.skip(f"the kernel does not tell ({os.strerror(ctypes.get_errno())}), before Linux 6.5")
    return int(found[1]) * os.sysconf("SC_PAGESIZE")


async def test_writing_out_the_hosts_disks(native: Substrate, tmp_path: Path) -> None:
    """`sync` in a sandbox waits for no disk: what others wrote there is theirs to write out."""

    def write(number: int) -> int:
        (tmp_path / str(number)).write_bytes(os.urandom(16 << 20))
        return unwritten(tmp_path / str(number))

    async with native.sandbox(limits=LIMITS) as sandbox:
        for number in range(10):  # the kernel may write it out by itself, or anybody else have it do so
            if not await anyio.to_thread.run_sync(write, number):
                pytest.skip("what is written to the temporary directory goes to no disk")
            assert await python(sandbox, "os.sync(); print('done')") == ["done"]
            if await anyio.to_thread.run_sync(unwritten, tmp_path / str(number)) > 8 << 20:
                return
    raise AssertionError("each time it was written out")


async def test_locks_of_the_host(native: Substrate) -> None:
    """Nobody can lock a file while the kernel lists them."""
    async with native.sandbox(limits=LIMITS) as sandbox:
        script = """
        import fcntl
        file = open("locked", "w")
        fcntl.lockf(file, fcntl.LOCK_EX)
        print(len(open("/proc/locks").read()))
        """
        assert await python(sandbox, script) == ["0"]
