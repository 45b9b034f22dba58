"""Where layers can be had, as people write it: a file, a directory, a command to talk to."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dutyfree.engine.images import archives
from dutyfree.engine.images.halting import Halt
from dutyfree.engine.images.store import Store
from dutyfree.engine.images.streams import Refused
from dutyfree.engine.travel.layout import LayoutPeer
from dutyfree.engine.travel.peers import Patient, Peer, StorePeer, StreamPeer
from dutyfree.errors import CreateError, UsageError

EXEC = "exec:"
STANDARD = "-"


@contextlib.contextmanager
def opened(source: str, store: Store, halt: Halt) -> Iterator[Peer]:
    """A peer: an archive (``-`` for standard input), a layout, another cache, or ``exec:COMMAND``.

    Raises UsageError, CreateError.
    """
    if source.startswith(EXEC):
        with _commanded(source.removeprefix(EXEC), halt) as peer:
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
        raise UsageError(
            f"there is no {source}", remedy="name an archive, a directory, or exec:COMMAND (docs/layers.md)"
        )


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
    return LayoutPeer(archives.Tar(path), what)


@contextlib.contextmanager
def _commanded(command: str, halt: Halt) -> Iterator[Peer]:
    try:
        process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"{command!r} cannot be run: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield StreamPeer(Patient(process.stdout.fileno(), halt), process.stdin)
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()  # it ends by that
        process.stdout.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
