"""What ``ssh`` says on stderr, as errors with a remedy."""

from __future__ import annotations

import shlex
from pathlib import Path

from dutyfree.contract.errors import Unavailable
from dutyfree.substrates.ssh.config import SshConfig

_FAILED = "the authentication failed"
_CAUSES = (
    (
        ("Bad configuration option", "command-line: line", "missing argument", "unsupported option"),
        "ssh does not take an option",
        "check options=: each is NAME=VALUE of ssh_config; this must work: `{batch} true`",
    ),
    (
        ("REMOTE HOST IDENTIFICATION HAS CHANGED",),
        "the host key has changed",
        "if the machine was set up again, remove the old key: ssh-keygen -R {known}",
    ),
    (
        ("Host key verification failed", "No matching host key", "host key is known for"),
        "the host key is not known",
        "run `{ssh} true` once and compare the key, or add it to ~/.ssh/known_hosts",
    ),
    (
        ("Permission denied", "Too many authentication failures", "No supported authentication"),
        _FAILED,
        "`{batch} true` must work: load the key with ssh-add, or name it: identity=",
    ),
    (
        ("Could not resolve hostname",),
        "the host name is not known",
        "check the option host=, or add the host to ~/.ssh/config",
    ),
    (
        ("Connection refused", "timed out", "No route to host", "Network is unreachable", "reset by peer"),
        "the machine does not answer",
        "check the address, the port, and that an sshd runs there",
    ),
)


def unavailable(config: SshConfig, said: str) -> Unavailable:
    """The error if a connection could not be opened; ``said`` is the stderr of ``ssh``. Blocks."""
    host = config.host
    name = host.rpartition("@")[2]
    words = {
        "ssh": shlex.join(["ssh", *config.flags, host]),
        "batch": shlex.join(["ssh", "-o", "BatchMode=yes", *config.flags, host]),
        "known": shlex.quote(f"[{name}]:{config.port}" if config.port not in (0, 22) else name),
    }
    for texts, cause, remedy in _CAUSES:
        if any(text in said for text in texts):
            if cause == _FAILED and config.identity and not Path(config.identity).expanduser().is_file():
                return Unavailable(
                    f"ssh {host}: {cause}: the file {config.identity} does not exist",
                    remedy="check the option identity=: it names the file of a private key",
                )
            return Unavailable(f"ssh {host}: {cause}: {last_line(said)}", remedy=remedy.format(**words))
    return Unavailable(
        f"ssh {host}: {last_line(said) or 'the connection failed'}",
        remedy=f"`{words['batch']} true` must work",
    )


def last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""
