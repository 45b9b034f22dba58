"""An edit of a file of this host: the whole file is replaced, or nothing is."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from dutyfree.contract.perform import edited


def replace_once(target: Path, read: Callable[[Path], bytes], name: str, old: bytes, new: bytes) -> None:
    """Raises EditError, naming the file ``name``, and OSError. Blocks."""
    real = Path(os.path.realpath(target))
    text = edited(name, read(real), old, new)
    found = real.stat()
    scratch = real.with_name(f".dutyfree-{os.getpid()}-{threading.get_ident()}")
    try:
        scratch.write_bytes(text)
        os.chown(scratch, found.st_uid, found.st_gid)
        scratch.chmod(stat.S_IMODE(found.st_mode))
        scratch.replace(real)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
