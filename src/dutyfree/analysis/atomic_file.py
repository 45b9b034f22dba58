"""Write files atomically, even if two processes write the same file or the writer is killed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a draft to write, then rename it to ``path``: readers see the old file or the new one.

    Other writers in the same directory wait. So a draft that is already there was left by a killed process,
    and is overwritten. Raises OSError.
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
