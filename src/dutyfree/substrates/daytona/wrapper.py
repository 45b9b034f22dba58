"""The shell code around a command, and how its answer is read. No I/O.

Daytona gives output as text: bytes that are not UTF-8 are lost, its plain ``exec`` mixes both streams, and
its sessions take neither a directory nor variables. So /bin/sh runs the command with both streams in files,
and then prints each stream in a frame: a line with the mark and the sizes, the bytes in base64, a line with
the mark. A frame without its last line was not received whole. Output that is too long for a frame stays in
its file.
"""

from __future__ import annotations

import base64
import binascii
import shlex
from collections.abc import Mapping

import msgspec

from dutyfree.contract import Command
from dutyfree.substrates.local.kill_script import MARK

FRAME_MAX = 64 << 10
"""Bytes of a stream that are sent in its frame. A session reads it line by line in a shell, slowly."""
NO_INPUT = "-"
INLINE_MAX = 32 << 10
"""Bytes of input that are sent with the command."""
TEXT_MAX = 96 << 10
"""Bytes of shell code in one request: Linux takes an argument of up to 128 KiB."""

# Only the command has the mark of KILL_SCRIPT in its environment. So if the command is killed, this shell
# lives on, and gives the output until then. Arguments: mark, directory, bytes to keep of each stream,
# descriptor of the second frame, input ("-" for none, "=" and base64, or a path), and the command.
WRAPPER = r"""
mark=$1 cwd=$2 keep=$3 second=$4 input=$5; shift 5
refuse() {
  printf '\n%s refused %s\n%s end\n' "$mark" "$(printf %s "$1" | base64 | tr -d '\n')" "$mark"
  exit 0
}
dir=$(mktemp -d "${TMPDIR:-/tmp}/dutyfree-XXXXXX" 2>&1) || refuse "$dir"
left=
trap '[ -n "$left" ] || rm -rf "$dir"' EXIT
case $input in
  -) input=/dev/null ;;
  =*) printf %s "${input#=}" | base64 -d >"$dir/in" || refuse 'cannot write the input'; input=$dir/in ;;
esac
[ -e "$cwd" ] || refuse "$cwd: No such file or directory"
why=$(LC_ALL=C; export LC_ALL; cd -- "$cwd" 2>&1) || refuse "$why"
( cd -- "$cwd" && exec "$@" ) <"$input" >"$dir/out" 2>"$dir/err"
code=$?
[ "$input" = /dev/null ] || rm -f "$input"
frame() {
  size=$(wc -c <"$dir/$1"); size=$((size))
  if [ "$size" -gt "$keep" ]; then
    head -c $((keep / 2)) "$dir/$1" >"$dir/kept"
    tail -c $((keep - keep / 2)) "$dir/$1" >>"$dir/kept"
    mv "$dir/kept" "$dir/$1"
  fi
  held=$(wc -c <"$dir/$1"); held=$((held))
  if [ "$held" -gt FRAME_MAX ]; then
    left=1
    printf '\n%s %s %s %s %s\n%s end\n' "$mark" "$1" "$code" "$size" "$dir/$1" "$mark"
  else
    printf '\n%s %s %s %s\n' "$mark" "$1" "$code" "$size"
    base64 "$dir/$1"
    printf '%s end\n' "$mark"
  fi
}
frame out
frame err >&"$second"
exit 0
""".replace("FRAME_MAX", str(FRAME_MAX))


class Frame(msgspec.Struct, frozen=True):
    """One stream of a command that ended."""

    code: int
    size: int
    """Bytes that the command wrote."""
    data: bytes = b""
    path: str = ""
    """The file that has the bytes, if they are too long for the frame."""


class Refusal(msgspec.Struct, frozen=True):
    """The command did not start."""

    reason: str


def shell_code(
    mark: str,
    command: Command,
    *,
    cwd: str,
    env: Mapping[str, str],
    keep: int,
    stdin: str = NO_INPUT,
    second: int = 2,
) -> str:
    """The text that runs a command. ``stdin``: see ``inline_input``, or a path in the sandbox.

    ``second`` is the descriptor of the frame of stderr: 2 if Daytona separates the streams, otherwise 1.
    """
    words = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
    # Only ``env`` takes variables with any name. It also finds the command by the new PATH.
    given = [f"{name}={value}" for name, value in {**env, MARK: mark}.items()]
    arguments = (mark, cwd, str(keep), str(second), stdin, "env", *given, *_not_assigned(words))
    return shlex.join(("/bin/sh", "-c", WRAPPER, "sh", *arguments))


def _not_assigned(words: tuple[str, ...]) -> tuple[str, ...]:
    """``env`` would take a program with "=" in its name, or that begins with "-", as its own argument."""
    if "=" in words[0] or words[0].startswith("-"):
        return ("/bin/sh", "-c", 'exec "$0" "$@"', *words)
    return words


def inline_input(data: bytes) -> str:
    return "=" + base64.b64encode(data).decode()


def found_frame(text: str, mark: str, stream: str) -> Frame | Refusal | None:
    """The frame of a stream, "out" or "err"; None if it is not there as a whole. Raises ValueError."""
    lines = iter(text.splitlines())
    for line in lines:
        words = line.split(" ", 4)
        if words[:2] == [mark, "refused"]:
            return Refusal(base64.b64decode(words[2] if len(words) > 2 else "").decode(errors="replace"))
        if words[:2] == [mark, stream] and len(words) >= 4:
            break
    else:
        return None
    body: list[str] = []
    for line in lines:
        if line == f"{mark} end":
            try:
                data = base64.b64decode("".join(body), validate=True)
            except binascii.Error as error:
                raise ValueError(f"the output is not base64: {error}") from error
            return Frame(int(words[2]), int(words[3]), data, words[4] if len(words) > 4 else "")
        body.append(line)
    return None
