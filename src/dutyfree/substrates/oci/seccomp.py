"""The seccomp filter of crun and runc: what Docker's default profile allows without extra capabilities.

gVisor needs none: its own kernel answers the system calls. The list is the one of ``native``, as are the
families of sockets, of which Docker allows more.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from dutyfree.engine.launcher.client import BINARY

LIST = BINARY.parents[1] / "init" / "setup" / "syscalls.h"

UNCONDITIONAL = ("ioctl", "prctl", "seccomp", "getsockopt", "setsockopt", "socketpair")
"""Calls whose arguments the filter of ``native`` checks; Docker's profile does not."""

NEW_NAMESPACES = 0x7E020000
"""The flags of ``clone`` that make namespaces."""

FAMILIES = (1, 2, 10, 16)
"""Families of sockets: Unix, IPv4, IPv6, netlink. Not vsock, which reaches the host of a virtual machine."""

LOWER_HALF = 0xFFFFFFFF
"""What the kernel uses of a family. A comparison of all 64 bits would let the others disguise one."""

PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Those that Docker allows: Linux and 32-bit Linux, also as a version 2.6; and to ask for the current one."""

ENOSYS, EPERM = 38, 1


@cache
def profile() -> dict[str, Any]:
    """The filter in the form of the OCI specification. Blocks on the first call."""
    names = re.findall(r"\bX\((\w+)", re.sub(r"#define \w+\(X\)", "", LIST.read_text()))
    allow = "SCMP_ACT_ALLOW"
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "syscalls": [
            {"names": sorted({*names, *UNCONDITIONAL} - {"clone"}), "action": allow},
            {
                "names": ["clone"],
                "action": allow,
                "args": [{"index": 0, "value": NEW_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}],
            },
            # Its flags are in memory, so no filter sees them. Programs then use clone.
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
            *(
                {
                    "names": ["socket"],
                    "action": allow,
                    "args": [
                        {"index": 0, "value": LOWER_HALF, "valueTwo": family, "op": "SCMP_CMP_MASKED_EQ"}
                    ],
                }
                for family in FAMILIES
            ),
            *(
                {
                    "names": ["personality"],
                    "action": allow,
                    "args": [{"index": 0, "value": value, "op": "SCMP_CMP_EQ"}],
                }
                for value in PERSONALITIES
            ),
        ],
    }
