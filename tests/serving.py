"""Servers that tests start: a ``dutyfree serve`` of their own, as users start it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trustme

from tests.processes import speaking


@contextmanager
def serving(state: Path, *arguments: str, listen: str = "127.0.0.1:0") -> Iterator[str]:
    """The URL of a server, which ends with the context and must end well."""
    with _started(state, *arguments, listen=listen) as (process, url):
        yield url
        process.send_signal(signal.SIGINT)  # after SIGTERM its sandboxes would go on
        assert process.wait(60) == 130


@contextmanager
def ended_by_sigterm(state: Path) -> Iterator[str]:
    """The URL of a server that ends with the context. The next one with this state must go on."""
    with _started(state, listen="127.0.0.1:0") as (process, url):
        yield url
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@contextmanager
def _started(state: Path, *arguments: str, listen: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = ("serve", "--listen", listen, "--state", str(state), *arguments)
    with speaking(sys.executable, "-m", "dutyfree", *command) as (process, line):
        found = re.search(r"serving sandboxes at (\S+);", line)
        assert found, line
        yield process, found[1]


def certificates(directory: Path) -> tuple[Path, Path, Path]:
    """Files of an authority, a certificate for the loopback, and its key."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    root, chain, key = (directory / name for name in ("root.pem", "chain.pem", "key.pem"))
    authority.cert_pem.write_to_path(str(root))
    issued.cert_chain_pems[0].write_to_path(str(chain))
    issued.private_key_pem.write_to_path(str(key))
    return root, chain, key
