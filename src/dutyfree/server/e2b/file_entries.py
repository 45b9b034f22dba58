"""The entries of files as E2B shows them, from what stat and find print in the sandbox."""

from __future__ import annotations

import posixpath
import stat
from datetime import UTC, datetime
from typing import Any

TYPES = {0o100000: "FILE_TYPE_FILE", 0o040000: "FILE_TYPE_DIRECTORY", 0o120000: "FILE_TYPE_SYMLINK"}
_KINDS = {"f": 0o100000, "d": 0o040000, "l": 0o120000}
"""The types of files as find writes them."""

FIELDS = "%f\t%s\t%U\t%G\t%Y\t%n"
LIST = f'''
list() {{ find "$1" -mindepth 1 -maxdepth "$2" "$3" "$4"; }}
list "$1" "$2" -printf "=%y%m\t%s\t%u\t%g\t%T@\t%p\\0" 2>/dev/null && exit
exec find "$1" -mindepth 1 -maxdepth "$2" -exec stat -c "{FIELDS}" -- {{}} +
'''
"""GNU's find ends each name with a NUL. Busybox has only lines, so names with a newline are left out."""
TARGET = 'printf "%s\t%s\n" "$(stat -L -c %f -- "$1" 2>/dev/null)" "$(readlink -f -- "$1")"'


def entry_of(line: str) -> dict[str, Any] | None:
    """One file, from what stat or find prints; None for what is no entry."""
    parts = line.split("\t", 5)
    if len(parts) < 6:
        return None
    raw, size, owner, group, modified, path = parts
    kind, bits = raw[1:2], raw[2:]
    mode = _KINDS.get(kind, 0) | int(bits, 8) if raw.startswith("=") else int(raw, 16)
    return {
        "name": posixpath.basename(path),
        "type": TYPES.get(mode & 0o170000, "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        "size": size,  # a 64-bit number is a text in the JSON of protocol buffers
        "mode": mode & 0o7777,
        "permissions": _permissions(mode),
        "owner": owner,
        "group": group,
        "modifiedTime": _time(int(modified.partition(".")[0])),
    }


def _permissions(mode: int) -> str:
    return stat.filemode(mode)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
