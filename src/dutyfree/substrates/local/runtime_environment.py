"""The environment of a program that runs untrusted code on this host, such as QEMU or an OCI runtime."""

from __future__ import annotations

import os

KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "XDG_RUNTIME_DIR")


def runtime_environment(marks: dict[str, str]) -> dict[str, str]:
    """What such a program needs, and ``marks``. Code that takes it over must not read our credentials."""
    return {name: os.environ[name] for name in KEPT if name in os.environ} | marks
