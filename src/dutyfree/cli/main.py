"""The entry point: find the command, run it, turn errors into messages and an exit status."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable

from dutyfree.cli.signals import interruptible
from dutyfree.contract.errors import DutyfreeError, UsageError


def main() -> int:
    """Run the command in ``sys.argv`` and return the exit status.

    0: success. 1: failure. 2: wrong usage. 130: interrupted. 141: the reader of the output has closed the
    pipe, which is the status of a program killed by SIGPIPE.
    """
    _open_standard_streams()
    try:
        status = _run_command()
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        _discard_output()
        _print_error(DutyfreeError(f"the output could not be written: {error.strerror}"))
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
    """Send what Python has still to flush at exit to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command() -> int:
    try:
        call = _parse()
        with interruptible():
            return call() or 0
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # rich exits the program itself
            raise error.__context__ from None
        raise
    except DutyfreeError as error:
        _print_error(error)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("dutyfree: interrupted", file=sys.stderr)  # noqa: T201 (command-line output)
        return 130


def _parse() -> Callable[[], int | None]:
    """The function to call for the command line. Raises UsageError."""
    if sys.argv[1:2] == ["run"]:
        from dutyfree.cli import run

        if call := run.parse(sys.argv[1:]):
            return call
    from dutyfree.cli import commands

    return commands.parse()


def _print_error(error: DutyfreeError) -> None:
    print(f"dutyfree: {error.message}", file=sys.stderr)  # noqa: T201
    if error.remedy:
        print(f"  → {error.remedy}", file=sys.stderr)  # noqa: T201
