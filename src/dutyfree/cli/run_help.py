"""``dutyfree run`` for the general parser: its options and its help."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from dutyfree.cli.run import run_once
from dutyfree.cli.sandbox_options import SandboxOptions


def run(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    options: Annotated[SandboxOptions, Parameter(name="*")] = SandboxOptions(),  # noqa: B008 (frozen)
    timeout: float | None = None,
    json: bool = False,
) -> int:
    """Run one command in a fresh sandbox, and remove the sandbox.

    The command's output appears at once, on the same streams. If standard input is a pipe or a file, the
    command reads it. The exit status is the command's: 128 + n if signal n killed it, 124 after a timeout.
    Ctrl-C ends the command.

    For example:

        dutyfree run -- python3 -c "print(1)"
        dutyfree run --image debian:12 --memory 512M --timeout 60 -- sh -c "df /"
        dutyfree run --upload .:/src --cwd /src --download /src/out:out -- make
        dutyfree run --recipe recipe.toml --cwd repository -- python3 -m pytest
        dutyfree run --network example.org:443 -- curl https://example.org
        echo "print(1)" | dutyfree run --json -- python3

    Parameters
    ----------
    command
        The program and its arguments, after "--". No shell runs them. Default: the image's entry point and
        command.
    timeout
        Kill the command and all its processes after this many seconds.
    json
        Print the observation as JSON on standard output: exit code, output, timing spans, resources used.
    """
    return run_once(command, options, timeout, json)
