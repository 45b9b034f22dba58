"""The command ``dutyfree``, also as ``python -m dutyfree``."""

import _signal as signal  # type: ignore[import-not-found]  # "signal" imports enum, which is slow
import sys


def main() -> int:
    """Run a command. Ctrl-C while modules load, or after the command, ends the process silently."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dutyfree.cli import main as command_line

    return command_line.main()


if __name__ == "__main__":
    sys.exit(main())
