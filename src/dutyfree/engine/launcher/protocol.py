"""``init/protocol.h`` for Python. Change both together, and VERSION with them.

A *request* goes from the owner to the launcher, a *frame* between the owner and the init of one sandbox.
"""

from __future__ import annotations

import errno
import struct
import time
from collections.abc import Sequence
from enum import IntEnum, IntFlag

VERSION = 3


class Request(IntEnum):
    HELLO = 1
    LAYER = 2
    SCRATCH = 3
    REMOVE_LAYER = 4
    CREATE = 5
    DESTROY = 6
    SLOTS = 8
    DISK = 9
    TEMPLATE = 10
    KEEP = 11
    LEASE = 12
    ADOPT = 13
    SWEEP = 14
    FREEZE = 30
    THAW = 31
    NETWORK = 20
    CONNECT = 21
    PROBE = 50
    SNAPSHOT_MOVE = 70
    SNAPSHOT_COPY = 71
    MERGE = 72
    AUDIT = 92


class CreateFlag(IntFlag):
    SHARED_NETWORK = 1
    DISK = 2


class WallFlag(IntFlag):
    USER_NAMESPACE = 1
    NAMESPACES = 2
    SECCOMP = 4
    MEMORY_CGROUP = 8
    CGROUPS = 16
    CPU_PRIORITY = 32


class PlaceKind(IntEnum):
    PLAIN = 1
    FIXED = 2


class NetworkFlag(IntFlag):
    ALL = 1


class RuleKind(IntEnum):
    ADDRESS = 1
    NAME = 2
    SUBDOMAINS = 3
    HOST = 4


class Frame(IntEnum):
    EXEC = 1
    KILL = 2
    CREDIT = 3
    READ = 4
    WRITE = 5
    LIST = 6
    REMOVE = 7
    UNPACK = 8
    PACK = 9
    SIGNAL_ALL = 10
    PING = 11
    TERMINAL = 12
    EDIT = 13
    SEARCH = 14
    WATCH = 15
    SIGNAL_COMMAND = 16
    POSTPONE = 17
    INPUT = 18
    VERIFY = 90
    BACKGROUND = 91
    SERVICE = 100
    CALL = 101
    AWAIT = 102
    READY = 32
    FATAL = 33
    OUTPUT = 34
    EXIT = 35
    DONE = 36
    STARTED = 37
    TAKEN = 38
    ADOPTED = 39


SPARE = 1
WITH_FD = 0x100
WITH_INPUT = 0x200
AFTER = 0x400
IF_OK = 0x800
EXEC_STREAM = 1


class ExitFlag(IntFlag):
    TIMED_OUT = 1
    KILLED = 2
    NOT_STARTED = 4
    NO_DIRECTORY = 8
    NO_USER = 16
    NO_PROCESS = 32
    OOM = 64


class SearchFlag(IntFlag):
    REGEX = 1
    NOCASE = 2
    BINARY = 4


class MatchFlag(IntFlag):
    CUT = 1
    TRUNCATED = 2
    LAST = 4


class WatchFlag(IntFlag):
    RECURSIVE = 1


class AwaitKind(IntEnum):
    FILE = 1
    SOCKET = 2


ERROR_SPECIAL = errno.ENOTBLK
"""A file operation met a pipe, a socket or a device."""

ERROR_KILLED = errno.EOWNERDEAD
"""A process of the sandbox killed the worker process of this operation."""

ERROR_NOT_ONCE = errno.EDOM
"""The text of an edit does not occur exactly once. The payload has the count and the lines."""

ERROR_PATTERN = errno.EILSEQ
"""The regular expression of a search is not valid."""

FRAME_MAX = 4 << 20
INLINE_MAX = 256 << 10
LISTING_MAX = 32 << 20
READ_MAX = 1 << 30
INPUT_WINDOW = 256 << 10
"""Bytes of INPUT that may be sent before init says that they are taken."""
FRAME_COST = 128
"""Bytes that each frame of output counts in addition to its own, since it may carry a single byte."""
FOREVER = 1e9
"""The longest timeout in seconds that a frame can carry; longer ones and infinity become this."""
MOUNTPOINT_MAX = 64
LABEL_MAX = 128
LAYERS_MAX = 32
TREES_MAX = 8
PLACES_MAX = 8
RESOLVERS_MAX = 3
RULES_MAX = 256
REQUEST_MAX = 16384

REQUEST = struct.Struct("=IIII")
REPLY = struct.Struct("=IiII")
CREATE = struct.Struct("=IIQQQQQ")
DISK_LIMIT = struct.Struct("=Q")
TREE = struct.Struct(f"={MOUNTPOINT_MAX}sI{LAYERS_MAX}I")
PLACES = struct.Struct("=I4x")
PLACE = struct.Struct(f"={MOUNTPOINT_MAX}sI")
MERGE = struct.Struct(f"=IIQ{LAYERS_MAX}I")
SNAPSHOT_USAGE = struct.Struct("=QQ")
AUDIT_RESULT = struct.Struct("=Q")
FRAME = struct.Struct("=IHHI")
EXEC = struct.Struct("=QIIIII4x")
CALL_REQUEST = struct.Struct("=I")
AWAIT_REQUEST = struct.Struct("=I")
WRITE = struct.Struct("=I")
NUMBER = struct.Struct("=I")
NANOSECONDS = struct.Struct("=Q")
WINDOW = struct.Struct("=HH")
EDIT = struct.Struct("=II")
SEARCH = struct.Struct("=QIIIIII")
MATCH = struct.Struct("=IIII")
WATCH = struct.Struct("=II")
CHANGE = struct.Struct("=II")
ERROR = struct.Struct("=i")
READY = struct.Struct("=IIQQ")
EXIT = struct.Struct("=iIQQQQQQQQQQQ")
RULE = struct.Struct("=16sHBBI")
RESOLVER = struct.Struct("=16sHxx")
NETWORK = struct.Struct("=III")
PORT = struct.Struct("=HH")
ENTRY = struct.Struct("=QII")
MEMBER = struct.Struct("=QII")

_SLACK = 4 << 20  # what two pipes can hold when their process ends, and the last reads
_OUTPUT_LIMITS = struct.Struct("=8xII")
_BEFORE_EXEC = {Frame.TERMINAL: WINDOW.size, Frame.CALL: CALL_REQUEST.size}
_COMMANDS = (Frame.EXEC, Frame.CALL, Frame.SERVICE, Frame.TERMINAL)
_REPLY_LIMITS = {Frame.LIST: LISTING_MAX + _SLACK, Frame.SEARCH: LISTING_MAX + _SLACK}

Tree = tuple[str, tuple[int, ...]]
"""Mount point relative to the root ("" is the root itself), and layers, the uppermost first."""

Place = tuple[str, PlaceKind]
"""A directory without an overlay, relative to the root."""


def create(
    flags: int,
    trees: Sequence[Tree],
    *,
    memory: int,
    disk: int,
    shm: int,
    pids: int,
    cpu_quota: int,
    places: Sequence[Place] = (),
) -> bytes:
    """The body of a Request.CREATE."""
    head = CREATE.pack(flags, len(trees), memory, disk, shm, pids, cpu_quota)
    packed = [
        TREE.pack(mountpoint.encode(), len(layers), *layers, *[0] * (LAYERS_MAX - len(layers)))
        for mountpoint, layers in trees
    ]
    packed += [bytes(TREE.size * (TREES_MAX - len(trees))), PLACES.pack(len(places))]
    packed += [PLACE.pack(path.encode(), kind) for path, kind in places]
    return head + b"".join(packed) + bytes(PLACE.size * (PLACES_MAX - len(places)))


def merge(own: Sequence[int], below: Sequence[int] = (), disk: int = 0) -> bytes:
    """The body of a Request.MERGE: layers of a tree, the uppermost first, and those that they refer to.

    ``disk`` is the template for a new layer on disk; 0 for one in memory.
    """
    padding = [0] * (LAYERS_MAX - len(own) - len(below))
    return MERGE.pack(len(own) + len(below), len(own), disk, *own, *below, *padding)


def label(number: int, image: str) -> bytes:
    """The end of a Request.CREATE: the title of the sandbox's init, with number, start time and image."""
    # Only the last part of a path: processes in the sandbox can read this.
    name = image.rstrip("/").rpartition("/")[2].encode(errors="replace").replace(b"\0", b"?")
    return f"{number} {int(time.time())} ".encode() + name[: LABEL_MAX - 32] + b"\0"


def reply_limit(kind: Frame, payload: bytes) -> int:
    """The most bytes, with FRAME_COST for each frame, that init may send in reply to this frame."""
    at = _BEFORE_EXEC.get(kind, 0)
    if kind in _COMMANDS and len(payload) >= at + EXEC.size:
        head: int
        tail: int
        head, tail = _OUTPUT_LIMITS.unpack_from(payload, at)
        return 2 * (head + tail) + (head + tail) // 64 + _SLACK
    return _REPLY_LIMITS.get(kind, INLINE_MAX + _SLACK)


def frame(kind: int, identity: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return FRAME.pack(len(payload), kind, flags, identity) + payload
