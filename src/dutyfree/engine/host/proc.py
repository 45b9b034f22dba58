"""Read /proc: processes, their environment and status, and kernel settings (sysctl).

It imports the standard library alone, and little of it: the reaper of ``substrates.local`` uses it too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

_EXITING = 0x4  # PF_EXITING of the kernel


class Stat(NamedTuple):
    """The fields of /proc/PID/stat that we use."""

    pid: int
    name: str
    state: str
    parent: int
    terminal: int
    """0: it has no terminal."""
    flags: int
    started: int
    """Clock ticks after boot."""

    @property
    def is_exiting(self) -> bool:
        """Whether it has begun to end. PID 1 of a namespace does so before the kernel kills the others."""
        return bool(self.flags & _EXITING)


def pids() -> Iterator[int]:
    """The pids that /proc shows in this pid namespace."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def stat(pid: int) -> Stat:
    """Raises OSError if the process is gone."""
    head, _, rest = read(f"{pid}/stat").rpartition(b")")
    name = head.partition(b"(")[2].decode(errors="replace")
    words = rest.split()
    return Stat(pid, name, words[0].decode(), int(words[1]), int(words[4]), int(words[6]), int(words[19]))


def environment(pid: int) -> bytes:
    """``NAME=value`` entries, each ended by a NUL. Raises OSError, also if only its user may read it."""
    return read(f"{pid}/environ")


def read(name: str) -> bytes:
    """A file in /proc. Raises OSError."""
    with open(f"/proc/{name}", "rb", buffering=0) as file:
        return file.read()


def text(name: str) -> str:
    """A file in /proc; empty if it does not exist or we may not read it."""
    try:
        return read(name).decode(errors="replace")
    except OSError:
        return ""


def field(status: str, name: str, default: str = "") -> str:
    """The value of a field in the text of /proc/PID/status."""
    lines = (line.partition(":") for line in status.splitlines())
    return next((value for found, _, value in lines if found == name), default)


def sysctl(name: str) -> str:
    """A kernel setting, such as ``kernel/pid_max``; empty if this kernel does not have it."""
    return text(f"sys/{name}").strip()


def boot_id() -> str:
    """The id of this boot of the machine: another one after a reboot. Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
