"""``dutyfree run``, as the general parser of the command line sees it."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from dutyfree.cli.run import once
from dutyfree.cli.sandbox_options import Wanted


def run(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    wanted: Annotated[Wanted, Parameter(name="*")] = Wanted(),  # noqa: B008 (frozen)
    timeout: float | None = None,
    json: bool = False,
) -> int:
    """Run one command in a fresh sandbox.

    What it prints comes as it comes, on the same streams; a pipe or a file given as standard input is
    its input. The exit status is the command's own, 128 + n if signal n killed it, 124 if its time was
    up. Ctrl-C ends it. Nothing of the sandbox is left.

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
        The program and its arguments, after "--"; without a shell. By default what the image itself runs,
        its entry point and command.
    timeout
        Seconds after which its whole process tree is killed.
    json
        Print what was observed, with where the time went, as JSON on standard output instead.
    """
    return once(command, wanted, timeout, json)
