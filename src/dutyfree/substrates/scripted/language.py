"""The tiny language: what the scripted substrate answers to commands that nobody scripted."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence

from dutyfree.contract import Exec, Observation
from dutyfree.substrates.scripted.files import WORKDIR, Files

_SHELL_SYNTAX = frozenset("|&;<>()$`\\*?[]{}#~\n")


def interpret(asked: Exec, files: Files) -> Observation:
    """The answer; exit code 127 for what is not in the language."""
    command, stdin, cwd = asked.command, asked.stdin or b"", asked.cwd or WORKDIR
    words: Sequence[str] = () if isinstance(command, str) else command
    try:
        cwd = files.directory(cwd)
        if isinstance(command, str) and _SHELL_SYNTAX.isdisjoint(command):
            words = shlex.split(command)
        match words:
            case ["true"] | ["exit"]:
                return Observation(exit_code=0)
            case ["false"]:
                return Observation(exit_code=1)
            case ["exit", code] if code.isdigit():
                return Observation(exit_code=int(code) % 256)
            case ["echo", *rest]:
                return Observation(
                    exit_code=0, stdout=(" ".join(rest) + "\n").encode(errors="surrogateescape")
                )
            case ["cat", *paths]:
                found = [files.read(posixpath.join(cwd, path)) for path in paths] if paths else [stdin]
                return Observation(exit_code=0, stdout=b"".join(found))
            case ["pwd"]:
                return Observation(exit_code=0, stdout=f"{cwd}\n".encode(errors="surrogateescape"))
            case ["printenv", name]:
                value = (asked.env or {}).get(name)
                return Observation(
                    exit_code=int(value is None), stdout=f"{value}\n".encode() if value else b""
                )
            case ["sleep", seconds]:
                return Observation(exit_code=0, seconds=float(seconds))
    except (OSError, ValueError) as error:
        return Observation(exit_code=1, stderr=f"{error}\n".encode(errors="replace"))
    return Observation(exit_code=127, stderr=f"no scripted answer to {command!r}\n".encode(errors="replace"))
