"""Open a peer by its address: a file, a directory, ``tcp://HOST:PORT``, or ``exec:COMMAND``."""

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
from dutyfree.engine.images import archives
from dutyfree.engine.images.streams import InvalidLayer
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.store import Store

EXEC = "exec:"
STDIN = "-"
REMEDY = "name an archive, a directory, tcp://HOST:PORT, or exec:COMMAND (docs/layers.md)"

EXIT_SECONDS = 5.0
"""How long a command may take to exit after its input is closed. Then it is killed."""
STDERR_TAIL = 500
"""Bytes of a command's standard error in an error message."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")


def check(source: str) -> None:
    """Check the form of a peer's address, not whether the peer exists. Raises UsageError."""
    if source.startswith(EXEC):
        _parse_command(source)
    elif source.startswith(tcp.SCHEME):
        tcp.parse_address(source.removeprefix(tcp.SCHEME))
    elif _SCHEME.match(source) or source in ("", STDIN):
        raise UsageError(f"{source!r} is not a peer", remedy=REMEDY)


@contextlib.contextmanager
def open_peer(source: str, store: Store, cancel: CancelToken, *, unattended: bool = False) -> Iterator[Peer]:
    """Open a peer: an archive (``-`` is standard input), a layout, a cache, ``tcp://…`` or ``exec:COMMAND``.

    If ``unattended``, a command has no terminal to ask questions at. Raises UsageError, CreateError.
    """
    if source.startswith(EXEC):
        with _run_command(_parse_command(source), cancel, unattended=unattended) as peer:
            yield peer
    elif source.startswith(tcp.SCHEME):
        with tcp.connect(source, cancel) as peer:
            yield peer
    elif source == STDIN:
        with store.scratch() as scratch:
            with open(scratch / "archive", "wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
            yield _open_archive(scratch / "archive", scratch, "standard input", cancel)
    elif Path(source).is_dir():
        yield _open_directory(Path(source).absolute(), cancel)
    elif Path(source).is_file():
        with store.scratch() as scratch:
            yield _open_archive(Path(source), scratch, source, cancel)
    else:
        raise UsageError(f"there is no {source}", remedy=REMEDY)


def _open_directory(path: Path, cancel: CancelToken) -> Peer:
    if (path / "index.json").is_file():
        return LayoutPeer(archives.LayoutDirectory(path), str(path))
    for root in (path, path / "layers", path / "dutyfree/layers"):
        if (root / "kept").is_dir():
            return StorePeer(Store(root), cancel)
    raise UsageError(
        f"{path} contains no layers",
        remedy="name a directory of `dutyfree layer export`, or a cache of dutyfree",
    )


def _open_archive(path: Path, scratch: Path, what: str, cancel: CancelToken) -> Peer:
    if archives.is_compressed(path):  # the archive itself, beyond its layers
        try:
            archives.expand(path, scratch / "expanded", cancel)
        except (InvalidLayer, OSError) as error:
            raise CreateError(f"{what} is not an archive: {error}") from error
        path = scratch / "expanded"
    try:
        return LayoutPeer(archives.ImageTar(path), what)
    except archives.NotATar as error:
        raise CreateError(f"{what} is not an archive of layers: {error.__cause__}", remedy=REMEDY) from error


def _parse_command(source: str) -> list[str]:
    command = source.removeprefix(EXEC)
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{command!r} cannot be run: {error}") from error
    if not words:
        raise UsageError(f"{source!r} names no command", remedy=REMEDY)
    return words


@contextlib.contextmanager
def _run_command(words: list[str], cancel: CancelToken, *, unattended: bool) -> Iterator[Peer]:
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr if unattended else None,
                start_new_session=unattended,
            )
        except OSError as error:
            raise UsageError(f"{shlex.join(words)!r} cannot be run: {error}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            stream = MessageStream(CancellableReader(process.stdout.fileno(), cancel), process.stdin)
            yield StreamPeer(stream, lambda: _tail(stderr.fileno()))
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()  # it should exit now
            process.stdout.close()
            try:
                process.wait(0 if cancel.is_set() else EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                if unattended:
                    with contextlib.suppress(OSError):
                        os.killpg(process.pid, signal.SIGKILL)  # and all that it started
                process.kill()
                process.wait()


def _tail(file: int) -> str:
    """The last bytes of a file, as text."""
    size = os.fstat(file).st_size
    return os.pread(file, STDERR_TAIL, max(0, size - STDERR_TAIL)).decode(errors="replace").strip()
