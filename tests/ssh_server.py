"""A real sshd on loopback, with keys and settings of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.processes import eventually

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""

_SETTINGS = """
ListenAddress 127.0.0.1
Port {port}
HostKey {root}/host_key
PidFile {root}/sshd.pid
AuthorizedKeysFile {root}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
PermitUserEnvironment no
MaxStartups 100
PrintMotd no
{more}
"""


class SshServer:
    """A server that runs, and how to reach it."""

    def __init__(self, root: Path, port: int, process: subprocess.Popen[bytes]) -> None:
        self.root = root
        self.port = port
        self.process = process

    @property
    def options(self) -> dict[str, Any]:
        """The options of the substrate ``ssh``."""
        return {"host": "dutyfree-test", "config": str(self.root / "config"), "directory": str(self.base)}

    @property
    def base(self) -> Path:
        """Where sandboxes are."""
        return self.root / "base"

    def sessions(self) -> list[int]:
        """The processes that serve connections."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if entry.name.isdigit() and int(words[1]) == self.process.pid:
                found.append(int(entry.name))
        return found


def _key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as reached:
            return reached.recv(4) == b"SSH-"
    except OSError:
        return False


@contextmanager
def ssh_server(root: Path, more: str = "", *, namespaces: bool = True) -> Iterator[SshServer]:
    """Start a server; ``more`` are further settings of sshd_config. Skips without an sshd.

    Without ``namespaces`` its users cannot make any, as those of most machines.
    """
    if not SSHD or not shutil.which("ssh"):
        pytest.skip("no sshd; to enable it: apt-get install openssh-server openssh-client")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it separates its privileges
    for name in ("host_key", "user_key"):
        _key(root / name)
    port = _free_port()
    (root / "sshd_config").write_text(_SETTINGS.format(port=port, root=root, more=more))
    kind, key, *_ = (root / "host_key.pub").read_text().split()
    (root / "known_hosts").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    (root / "config").write_text(
        f"Host dutyfree-test\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {root}/user_key\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {root}/known_hosts\n"
    )
    (root / "base").mkdir(exist_ok=True)
    log = root / "log"
    command = [SSHD, "-D", "-e", "-f", str(root / "sshd_config")]
    if not namespaces and os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", *command]
    with log.open("wb") as errors, subprocess.Popen(command, stderr=errors) as process:
        try:
            assert eventually(lambda: _answers(port) or process.poll() is not None), log.read_text()
            assert process.poll() is None, log.read_text()
            yield SshServer(root, port, process)
        finally:
            process.terminate()
