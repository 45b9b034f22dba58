"""Why this host lets nobody, or nobody but root, make user namespaces."""

from __future__ import annotations

import os
from pathlib import Path

REFUSED = "user namespaces cannot be made here"


def closed() -> tuple[str, str] | None:
    """The reason and the remedy, as far as the host's settings tell beforehand."""
    if setting("user/max_user_namespaces") == "0":
        return "user namespaces are switched off", "sysctl user.max_user_namespaces=16384"
    if os.geteuid() != 0 and setting("kernel/unprivileged_userns_clone") == "0":
        return (
            "user namespaces are for root only",
            "sysctl kernel.unprivileged_userns_clone=1, or run as root",
        )
    return None


def explain(error: str) -> tuple[str, str]:
    """Likewise, after the launcher has tried and failed without root."""
    if setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            f"AppArmor keeps user namespaces for root ({error})",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, a profile with `userns,`, or root",
        )
    return f"{REFUSED} ({error})", "run as root, or outside of the container that forbids them"


def setting(name: str) -> str:
    """A sysctl; empty where there is none of the name."""
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return ""
