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
from dutyfree.engine.exchange import tcp
from dutyfree.engine.exchange.layout import LayoutPeer
from dutyfree.engine.exchange.messages import CancellableReader, MessageStream
from dutyfree.engine.exchange.protocol import Peer, StorePeer, StreamPeer
from dutyfree.engine.exchange.tcp import TCP
from dutyfree.engine.images import archives
from dutyfree.engine.images.streams import InvalidLayer
from dutyfree.engine.store.cancel import CancelToken
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
        tcp.address(source.removeprefix(TCP))
    elif _SCHEME.match(source) or source in ("", STANDARD):
        raise UsageError(f"{source!r} is no peer", remedy=REMEDY)


@contextlib.contextmanager
def opened(source: str, store: Store, cancel: CancelToken, *, alone: bool = False) -> Iterator[Peer]:
    """A peer: an archive (``-`` is standard input), a layout, another cache, ``tcp://…`` or ``exec:COMMAND``.

    ``alone``, nobody sits before it: a command has no terminal to ask at. Raises UsageError, CreateError.
    """
    if source.startswith(EXEC):
        with _commanded(_words(source), cancel, alone=alone) as peer:
            yield peer
    elif source.startswith(TCP):
        with tcp.connected(source, cancel) as peer:
            yield peer
    elif source == STANDARD:
        with store.scratch() as scratch:
            with open(scratch / "archive", "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
            yield _archive(scratch / "archive", scratch, "standard input", cancel)
    elif Path(source).is_dir():
        yield _directory(Path(source).absolute(), cancel)
    elif Path(source).is_file():
        with store.scratch() as scratch:
            yield _archive(Path(source), scratch, source, cancel)
    else:
        raise UsageError(f"there is no {source}", remedy=REMEDY)


def _directory(path: Path, cancel: CancelToken) -> Peer:
    if (path / "index.json").is_file():
        return LayoutPeer(archives.LayoutDirectory(path), str(path))
    for root in (path, path / "layers", path / "dutyfree/layers"):
        if (root / "kept").is_dir():
            return StorePeer(Store(root), cancel)
    raise UsageError(
        f"{path} holds no layers", remedy="name a directory of `dutyfree layer export`, or a dutyfree cache"
    )


def _archive(path: Path, scratch: Path, what: str, cancel: CancelToken) -> Peer:
    if archives.is_compressed(path):  # by somebody else, a second time
        try:
            archives.expand(path, scratch / "expanded", cancel)
        except (InvalidLayer, OSError) as error:
            raise CreateError(f"{what} is no archive: {error}") from error
        path = scratch / "expanded"
    try:
        return LayoutPeer(archives.ImageTar(path), what)
    except archives.NotATar as error:
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
def _commanded(words: list[str], cancel: CancelToken, *, alone: bool) -> Iterator[Peer]:
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
            lines = MessageStream(CancellableReader(process.stdout.fileno(), cancel), process.stdin)
            yield StreamPeer(lines, lambda: _tail(said.fileno()))
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()  # it ends by that
            process.stdout.close()
            try:
                process.wait(0 if cancel.is_set() else ENDING)
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
