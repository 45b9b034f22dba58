"""The command ``dutyfree``, also as ``python -m dutyfree``."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run a command. Ctrl-C while it is being loaded ends it without a word."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dutyfree import cli

    signal.signal(signal.SIGINT, usual)
    cli.main()


if __name__ == "__main__":
    main()
