"""The command line: thin. Every command is one function over the library; ``commands`` has them all.

A command loads only what it needs: ``run`` not even the general parser (``run_parser``).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dutyfree.cli.interrupts import interruptible
from dutyfree.contract.errors import DutyfreeError, UsageError

if TYPE_CHECKING:
    from dutyfree.cli.commands import app as app
else:

    def __getattr__(name: str) -> object:
        if name != "app":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from dutyfree.cli.commands import app

        return app


def main() -> int:
    """Run a command. Exit status: 0 done, 1 it failed, 2 it was asked wrongly, 130 interrupted.

    141 says that nobody reads its output any more, as of a program that SIGPIPE has killed.
    """
    _open_standard_streams()
    try:
        status = _main()
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _discard_output()
        _say(DutyfreeError(f"the output could not be written: {error.strerror}"))
        return 1
    return status


def _open_standard_streams() -> None:
    """Open /dev/null for each standard stream that the caller closed.

    Otherwise the next file or socket that is opened gets the number of that stream.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _discard_output() -> None:
    """What Python has yet to write when it ends goes to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main() -> int:
    from dutyfree.cli import run_parser

    try:
        call: Callable[[], int | None] | None = run_parser.parsed(sys.argv[1:])
        if call is None:
            from dutyfree.cli import commands

            call = commands.parsed()
        with interruptible():
            return call() or 0
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich ends the program by itself
            raise error.__context__ from None
        raise
    except DutyfreeError as error:
        _say(error)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("dutyfree: interrupted", file=sys.stderr)  # noqa: T201 (the command line speaks)
        return 130


def unknown_option(word: str, known: Iterable[str], command: str) -> UsageError:
    from dutyfree.validation import suggestion

    return UsageError(
        f"there is no option {word}", remedy=suggestion(word, known) or f"see: {command} --help"
    )


def _say(error: DutyfreeError) -> None:
    print(f"dutyfree: {error.message}", file=sys.stderr)  # noqa: T201
    if error.remedy:
        print(f"  → {error.remedy}", file=sys.stderr)  # noqa: T201
