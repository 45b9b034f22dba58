"""What ``ssh`` says on stderr, as errors with a remedy."""

from __future__ import annotations

from dutyfree.contract.errors import Unavailable

_CAUSES = (
    (
        ("REMOTE HOST IDENTIFICATION HAS CHANGED",),
        "the host key has changed",
        "if the machine was set up again, remove the old key: ssh-keygen -R {host}",
    ),
    (
        ("Host key verification failed", "No matching host key", "host key is known for"),
        "the host key is not known",
        "run `ssh {host} true` once and compare the key, or add it to ~/.ssh/known_hosts",
    ),
    (
        ("Permission denied", "Too many authentication failures", "No supported authentication"),
        "the authentication failed",
        "`ssh -o BatchMode=yes {host} true` must work: load the key with ssh-add, or name it: identity=",
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


def unavailable(host: str, said: str) -> Unavailable:
    """The error if a connection could not be opened; ``said`` is the stderr of ``ssh``."""
    for texts, cause, remedy in _CAUSES:
        if any(text in said for text in texts):
            return Unavailable(f"ssh {host}: {cause}: {last_line(said)}", remedy=remedy.format(host=host))
    return Unavailable(
        f"ssh {host}: {last_line(said) or 'the connection failed'}",
        remedy=f"`ssh -o BatchMode=yes {host} true` must work",
    )


def last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else ""
