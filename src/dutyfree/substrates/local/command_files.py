"""The file methods of a sandbox by shell scripts that run in it.

A script that fails exits with ERRNO + the number of the error, from which the right OSError is made.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import tarfile
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

import anyio.to_thread

from dutyfree.contract import Entry, Observation
from dutyfree.contract.arguments import check_bytes, check_mode, encoded_path
from dutyfree.contract.entries import Links, entry
from dutyfree.contract.errors import (
    ActionError,
    ActionKind,
    EditError,
    SpecialFile,
    file_error,
)
from dutyfree.contract.perform import check_edit, edited
from dutyfree.substrates.local.archive import pack, unpack

ERRNO = 64

TOOL_OUTPUT = 1 << 30
"""How many bytes of the output of a tool are kept: a file, or a listing, may be endless."""

_PRELUDE = """
# Turn the error message of the shell or of a tool into an exit code.
fail() {
  case $1 in
    *'o space'* | *quota*) exit 92 ;;
    *'ame too long'*) exit 100 ;;
    *'levels of symbolic'* | *'ymbolic link loop'*) exit 104 ;;
    *'s a directory'*) exit 85 ;;
    *'ot a directory'* | *'ile exists'*) exit 84 ;;
    *enied* | *'ot permitted'* | *'ead-only'*) exit 77 ;;
  esac
  printf '%s\\n' "$1" >&2
  exit 1
}
# A path does not exist: is its parent not accessible, not a directory, or is only the name missing?
missing() {
  [ -d "$parent" ] && [ ! -x "$parent" ] && exit 77
  [ -e "$parent" ] && [ ! -d "$parent" ] && exit 84
  reason=$( { true <"$1"; } 2>&1 )
  case $reason in *'o such file'* | *nonexistent*) ;; *) [ -n "$reason" ] && fail "$reason" ;; esac
  exit 66
}
export LC_ALL=C
parent=${1%/*}; parent=${parent:-/}
"""
"""What every script begins with."""

READ = """
[ -d "$1" ] && exit 85
[ -e "$1" ] || missing "$1"
[ -f "$1" ] || exit 86
[ -r "$1" ] || exit 77
exec head -c 1073741825 <"$1"
"""

WRITE = """
[ -d "$1" ] && exit 85
[ -e "$1" ] && [ ! -f "$1" ] && exit 86
[ -d "$parent" ] || reason=$(mkdir -p -- "$parent" 2>&1) || fail "$reason"
reason=$( { true >"$1"; } 2>&1 ) || fail "$reason"
reason=$(cat 2>&1 >"$1") || fail "$reason"
reason=$(chmod "$2" "$1" 2>&1) || fail "$reason"
"""

REMOVE = """
[ -e "$1" ] || [ -L "$1" ] || missing "$1"
reason=$(rm -rf -- "$1" 2>&1) || fail "$reason"
"""

# GNU find prints everything at once. With busybox, names go to stderr, and stat prints in the same order.
LIST = """
[ -e "$1" ] || missing "$1"
[ -d "$1" ] || exit 84
[ -r "$1" ] && cd -- "$1" 2>/dev/null || exit 77
find . -mindepth 1 -maxdepth 1 -printf '%y %s %m %f\\0' 2>/dev/null && exit 0
find . -mindepth 1 -maxdepth 1 -print0 >&2
find . -mindepth 1 -maxdepth 1 -print0 | xargs -0 -r stat -c '%f %s' --
"""

# The top of the archive has the last name of the path.
UPLOAD = """
[ "$2" = directory ] || { [ -d "$1" ] && [ ! -L "$1" ] && exit 85; }
[ -d "$parent" ] || reason=$(mkdir -p -- "$parent" 2>&1) || fail "$reason"
cd -- "$parent" 2>/dev/null || exit 77
reason=$(tar -xpof - 2>&1) || fail "$reason"
"""

# GNU tar exits with 1 if a file changed while it was read.
DOWNLOAD = """
[ -e "$1" ] || [ -L "$1" ] || missing "$1"
[ -L "$1" ] || [ -f "$1" ] || [ -d "$1" ] || exit 86
cd -- "$parent" 2>/dev/null || exit 77
{ reason=$(tar -cf - "./${1##*/}" 2>&1 >&3) || [ $? = 1 ] || fail "$reason"; } 3>&1
"""

# The input is the old text, $2 bytes of it, and then the new one. Shells cannot replace bytes, so perl or
# python3 does it. A text that does not occur once: how often, and the first lines, on stdout.
_PERL = r"""
my ($path, $size) = @ARGV; local $/; binmode STDIN; binmode STDOUT;
my $given = <STDIN>; my ($old, $new) = (substr($given, 0, $size), substr($given, $size));
open(my $file, "+<:raw", $path) or exit(64 + $!);
my $text = <$file>; $text = "" unless defined $text;
my ($count, $first, $line, $seen, @lines) = (0, 0, 1, 0);
for (my $at = index($text, $old); $at >= 0; $at = index($text, $old, $at + $size)) {
  $first = $at unless $count++;
  next if @lines >= 16;
  $line += (substr($text, $seen, $at - $seen) =~ tr/\n//); $seen = $at;
  push @lines, $line;
}
if ($count != 1) { print "$count @lines"; exit 60 }
substr($text, $first, $size) = $new;
seek($file, 0, 0) && print($file $text) && truncate($file, length $text) && close($file) or exit(64 + $!);
"""

_PYTHON = r"""
import sys
path, size = sys.argv[1].encode(errors="surrogateescape"), int(sys.argv[2])
given = sys.stdin.buffer.read()
old, new = given[:size], given[size:]
try:
    with open(path, "r+b") as file:
        text = file.read()
        count, at, lines = text.count(old), text.find(old), []
        while at >= 0 and len(lines) < 16:
            lines.append(str(text.count(b"\n", 0, at) + 1))
            at = text.find(old, at + size)
        if count != 1:
            print(count, *lines)
            sys.exit(60)
        file.seek(0)
        file.write(text.replace(old, new))
        file.truncate()
except OSError as error:
    sys.exit(64 + error.errno)
"""

EDIT = f"""
[ -d "$1" ] && exit 85
[ -e "$1" ] || missing "$1"
[ -f "$1" ] || exit 86
[ -r "$1" ] && [ -w "$1" ] || exit 77
command -v perl >/dev/null 2>&1 && exec perl -e '{_PERL}' "$1" "$2"
command -v python3 >/dev/null 2>&1 && exec python3 -S -c '{_PYTHON}' "$1" "$2"
exit 61
"""
NOT_ONCE, NO_EDITOR = 60, 61

_KINDS = {"f": "file", "d": "directory", "l": "link"}


class FilesByCommands(ABC):
    """The file methods of a sandbox, for a substrate that can only run commands.

    The sandbox needs a POSIX shell, cat, head, mkdir, chmod, rm, find, stat and tar, of GNU or busybox. The
    contents of files pass through this process's memory.
    """

    _edits = True
    """Whether, as far as we know, the sandbox has a program that can edit files."""

    @property
    @abstractmethod
    def workdir(self) -> str: ...

    @abstractmethod
    async def run_tool(self, argv: tuple[str, ...], stdin: bytes | None = None) -> Observation:
        """Run a command in the sandbox, without the recipe's variables.

        It is a program of the sandbox, so keep at most TOOL_OUTPUT bytes of its output. Raises the errors of
        ``exec``.
        """

    async def read(self, path: str) -> bytes:
        return (await self._script(READ, path)).stdout

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        check_mode(mode)
        check_bytes(data)
        await self._script(WRITE, path, f"{mode:o}", stdin=bytes(data))

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        """Replace ``old``, which must occur exactly once in the file, by ``new``. Raises EditError.

        One command if the sandbox has perl or python3, otherwise a read and a write.
        """
        check_edit(old, new)
        if self._edits:
            encoded_path(path)
            argv = script(EDIT, posixpath.join(self.workdir, path), str(len(old)))
            seen = await self.run_tool(argv, bytes(old) + bytes(new))
            if seen.exit_code == NOT_ONCE and seen.started:
                raise _not_once(path, seen.stdout)
            if seen.exit_code != NO_EDITOR:
                check(seen, path)
                return
            self._edits = False
        await self.write(path, edited(path, await self.read(path), old, new))

    async def list(self, path: str) -> tuple[Entry, ...]:
        for _ in range(5):
            seen = await self._script(LIST, path)
            with suppress(ValueError):  # entries appeared or disappeared during the listing
                return entries(seen)
        raise ActionError(f"the directory {path!r} changes too fast to list it")

    async def remove(self, path: str) -> None:
        await self._script(REMOVE, path)

    async def upload(self, source: Path, path: str) -> None:
        encoded_path(path)
        whole = posixpath.normpath(posixpath.join(self.workdir, path))
        archive = io.BytesIO()
        await anyio.to_thread.run_sync(pack, Path(source), posixpath.basename(whole), archive)
        kind = "directory" if await anyio.Path(source).is_dir() else "file"
        await self._script(UPLOAD, whole, kind, stdin=archive.getvalue())

    async def download(self, path: str, target: Path, *, outside_links: bool = False) -> tuple[str, ...]:
        encoded_path(path)
        links = Links(path, outside=outside_links)
        whole = posixpath.normpath(posixpath.join(self.workdir, path))
        archive = io.BytesIO((await self._script(DOWNLOAD, whole)).stdout)
        try:
            await anyio.to_thread.run_sync(unpack, archive, Path(target), links, TOOL_OUTPUT)
        except tarfile.TarError as error:
            # The sandbox's own tar made it, which the agent may have changed.
            raise ActionError(f"the archive of {path!r} is broken: {error}", kind="refused") from error
        return tuple(links.left_out)

    async def _script(self, text: str, path: str, *rest: str, stdin: bytes | None = None) -> Observation:
        encoded_path(path)
        argv = script(text, posixpath.join(self.workdir, path), *rest)
        observation = await self.run_tool(argv, stdin)
        check(observation, path)
        if observation.cut.stdout:
            raise file_error(errno.EFBIG, path)
        return observation


def _not_once(path: str, said: bytes) -> ActionError:
    try:
        count, *lines = (int(word) for word in said.split())
    except ValueError:
        return ActionError(f"the sandbox's tools failed on {path!r}: they say {said[:80]!r}", kind="refused")
    return EditError(path, count, tuple(lines))


def script(text: str, path: str, *arguments: str) -> tuple[str, ...]:
    """The argument vector of a script for a path, which may have any bytes but NUL.

    Docker takes JSON, so a path that is not UTF-8 (with surrogates, as of ``os.fsdecode``) is sent as octal
    escapes. The x keeps newlines at the end of a name.
    """
    text = _PRELUDE + text
    try:
        path.encode()
    except UnicodeEncodeError:
        path = "".join(f"\\0{byte:03o}" for byte in os.fsencode(path))
        text = 'first=$(printf %bx "$1"); shift; set -- "${first%x}" "$@"\n' + text
    return ("/bin/sh", "-c", text, "sh", path, *arguments)


_REPORTED = (
    errno.ENOENT,
    errno.EACCES,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENOSPC,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)


def check(observation: Observation, path: str) -> None:
    """Raises the error that a script reported, and ActionError if the script itself failed.

    The script uses the tools of the sandbox, which the agent may have changed: so their failure is the
    agent's.
    """
    code, ran = observation.exit_code, observation.started
    if code == 0:
        return
    if ran and code == ERRNO + errno.EINVAL:
        raise SpecialFile(path)
    if ran and code - ERRNO in _REPORTED:
        raise file_error(code - ERRNO, path)
    reason = observation.stderr.decode(errors="replace").strip() or f"exit code {code}"
    raise ActionError(f"the sandbox's tools failed on {path!r}: {reason}", kind=_kind(observation, reason))


def _kind(observation: Observation, reason: str) -> ActionKind:
    if observation.signal == 9:
        return "killed"
    if "temporarily unavailable" in reason or "init-p" in reason or "Cannot fork" in reason:
        return "no_processes"
    return "no_memory" if "annot allocate memory" in reason else "refused"


def entries(observation: Observation) -> tuple[Entry, ...]:
    """Parse the output of LIST. Raises ValueError if the directory changed during the listing."""
    if not observation.stderr:
        records = (record.split(b" ", 3) for record in observation.stdout.split(b"\0") if record)
        found = [
            Entry(os.fsdecode(name), _KINDS.get(kind.decode(), "other"), int(size), int(mode, 8))  # type: ignore[arg-type]
            for kind, size, mode, name in records
        ]
    else:
        names = observation.stderr.split(b"\0")[:-1]
        stats = (line.split() for line in observation.stdout.splitlines())
        found = [
            entry(os.fsdecode(name.removeprefix(b"./")), int(mode, 16), int(size))
            for name, (mode, size) in zip(names, stats, strict=True)
        ]
    return tuple(sorted(found, key=lambda one: one.name))
