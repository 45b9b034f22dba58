"""What an instance does at its boot: it takes our keys, and ends itself at its deadline. For cloud-init."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from dutyfree.contract.errors import Unavailable

# In the background and without dependencies: at this moment the boot waits for us, and systemd for the boot.
# Without systemd a process waits. Whoever is root in the instance can stop both.
_END = """
{{
  trap '' HUP
  systemd-run --no-block --unit=dutyfree-deadline --on-active={seconds} --timer-property=AccuracySec=1s \
    --timer-property=DefaultDependencies=no --property=DefaultDependencies=no \
    systemctl poweroff --force --force ||
  {{ sleep {seconds}; poweroff -f || echo o >/proc/sysrq-trigger; }}
}} </dev/null >/dev/null 2>&1 &
"""


class KeyPair:
    """A key pair of ssh. Its repr does not show the private key."""

    def __init__(self, path: Path) -> None:
        """Read the files that ssh-keygen made. Blocks. Raises OSError."""
        self.path = path
        self.private = path.read_text()
        self.public = path.with_name(f"{path.name}.pub").read_text().strip()


def make_key(path: Path) -> KeyPair:
    """Make a key pair. Blocks. Raises Unavailable."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "dutyfree", "-f", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError as error:
        raise Unavailable(
            "there is no ssh-keygen program", remedy="install it: apt-get install openssh-client"
        ) from error
    if done.returncode:
        raise Unavailable(f"ssh-keygen failed: {done.stderr.decode(errors='replace').strip()}")
    return KeyPair(path)


def cloud_config(user: str, public: str, host_key: KeyPair | None, seconds: int) -> str:
    """The user data: ``public`` may log in as ``user``, and the instance ends itself after ``seconds``.

    It is JSON, which is YAML too.
    """
    config: dict[str, Any] = {
        "bootcmd": [["sh", "-c", _END.format(seconds=seconds)]],
        "disable_root": user != "root",
        "users": ["default"],
    }
    if public:
        account: dict[str, Any] = {"name": user, "ssh_authorized_keys": [public]}
        if user != "root":
            account |= {"sudo": "ALL=(ALL) NOPASSWD:ALL", "shell": "/bin/sh"}
        config["users"].append(account)
    if host_key is not None:
        config["ssh_deletekeys"] = True
        config["ssh_keys"] = {"ed25519_private": host_key.private, "ed25519_public": host_key.public}
    return f"#cloud-config\n{json.dumps(config, indent=1)}\n"
