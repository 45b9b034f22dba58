"""Files that are there whole or not at all, also where two write the same one, or the writer is killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A draft to write, which then takes the file's place: readers see the old one or the new one.

    Whoever writes in the same directory meanwhile waits, so a draft that is found there is of one that was
    killed, and is written over. Raises OSError.
    """
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        try:
            yield draft
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    finally:
        os.close(directory)
