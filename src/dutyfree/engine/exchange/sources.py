"""Where layers can be had, as people write it: a file, a directory, an address, a command to talk to."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dutyfree.contract.errors import CreateError, UsageError
from dutyfree.engine.exchange import network
from dutyfree.engine.exchange.layout import LayoutPeer
from dutyfree.engine.exchange.lines import Lines, Patient
from dutyfree.engine.exchange.network import TCP
from dutyfree.engine.exchange.peers import Peer, StorePeer, StreamPeer
from dutyfree.engine.images import archives
from dutyfree.engine.images.streams import Refused
from dutyfree.engine.store.cancel import Halt
from dutyfree.engine.store.store import Store

EXEC = "exec:"
STANDARD = "-"
REMEDY = "name an archive, a directory, tcp://HOST:PORT, or exec:COMMAND (docs/layers.md)"

ENDING = 5.0
"""Seconds in which a command ends that nobody talks to any more."""
TAIL = 500
"""Bytes of its complaints that are told."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")


def check(source: str) -> None:
    """Raises UsageError for what can be no source that is asked again and again, be it there or not."""
    if source.startswith(EXEC):
        _words(source)
    elif source.startswith(TCP):
        network.address(source.removeprefix(TCP))
    elif _SCHEME.match(source) or source in ("", STANDARD):
        raise UsageError(f"{source!r} is no peer", remedy=REMEDY)


@contextlib.contextmanager
def opened(source: str, store: Store, halt: Halt, *, alone: bool = False) -> Iterator[Peer]:
    """A peer: an archive (``-`` is standard input), a layout, another cache, ``tcp://…`` or ``exec:COMMAND``.

    ``alone``, nobody sits before it: a command has no terminal to ask at. Raises UsageError, CreateError.
    """
    if source.startswith(EXEC):
        with _commanded(_words(source), halt, alone=alone) as peer:
            yield peer
    elif source.startswith(TCP):
        with network.connected(source, halt) as peer:
            yield peer
    elif source == STANDARD:
        with store.scratch() as scratch:
            with open(scratch / "archive", "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
            yield _archive(scratch / "archive", scratch, "standard input", halt)
    elif Path(source).is_dir():
        yield _directory(Path(source).absolute(), halt)
    elif Path(source).is_file():
        with store.scratch() as scratch:
            yield _archive(Path(source), scratch, source, halt)
    else:
        raise UsageError(f"there is no {source}", remedy=REMEDY)


def _directory(path: Path, halt: Halt) -> Peer:
    if (path / "index.json").is_file():
        return LayoutPeer(archives.Directory(path), str(path))
    for root in (path, path / "layers", path / "dutyfree/layers"):
        if (root / "kept").is_dir():
            return StorePeer(Store(root), halt)
    raise UsageError(
        f"{path} holds no layers", remedy="name a directory of `dutyfree layer export`, or a dutyfree cache"
    )


def _archive(path: Path, scratch: Path, what: str, halt: Halt) -> Peer:
    if archives.is_compressed(path):  # by somebody else, a second time
        try:
            archives.expand(path, scratch / "expanded", halt)
        except (Refused, OSError) as error:
            raise CreateError(f"{what} is no archive: {error}") from error
        path = scratch / "expanded"
    try:
        return LayoutPeer(archives.Tar(path), what)
    except archives.NoTar as error:
        raise CreateError(f"{what} is no archive of layers: {error.__cause__}", remedy=REMEDY) from error


def _words(source: str) -> list[str]:
    command = source.removeprefix(EXEC)
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{command!r} cannot be run: {error}") from error
    if not words:
        raise UsageError(f"{source!r} names no command", remedy=REMEDY)
    return words


@contextlib.contextmanager
def _commanded(words: list[str], halt: Halt, *, alone: bool) -> Iterator[Peer]:
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said if alone else None,
                start_new_session=alone,
            )
        except OSError as error:
            raise UsageError(f"{shlex.join(words)!r} cannot be run: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            lines = Lines(Patient(process.stdout.fileno(), halt), process.stdin)
            yield StreamPeer(lines, lambda: _tail(said.fileno()))
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()  # it ends by that
            process.stdout.close()
            try:
                process.wait(0 if halt.is_set() else ENDING)
            except subprocess.TimeoutExpired:
                if alone:
                    with contextlib.suppress(OSError):
                        os.killpg(process.pid, signal.SIGKILL)  # with all that it started
                process.kill()
                process.wait()


def _tail(file: int) -> str:
    """The last of what a command complained of."""
    size = os.fstat(file).st_size
    return os.pread(file, TAIL, max(0, size - TAIL)).decode(errors="replace").strip()
