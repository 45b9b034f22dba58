"""The command ``dutyfree``, also as ``python -m dutyfree``."""

import _signal as signal  # type: ignore[import-not-found]  # without enumerations, which take their time
import sys


def main() -> int:
    """Run a command. Ctrl-C while it is being loaded, or when it is over, ends all without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dutyfree import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
