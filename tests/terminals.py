"""Commands on a terminal, as a person has one."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import termios


def on_terminal(*command: str, columns: int, environment: dict[str, str] | None = None) -> str:
    """What a command prints on a terminal of so many columns (0: it does not tell). Nothing is wrapped."""
    screen, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **(environment or {})}
    )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(screen, 1 << 16):
            seen += part
    except OSError:  # nobody holds the other side any more
        pass
    os.close(screen)
    process.wait()
    return seen.decode().replace("\r\n", "\n")


def is_quiet(text: str) -> bool:
    """Whether a terminal takes nothing in it for an order."""
    return all(one.isprintable() or one == "\n" for one in text)
