"""A listener that hands each connection to a program, as inetd does; a process of its own.

git daemon listens by itself too, but with a backlog of five: of 32 clones that start at once some are
then held up for a whole second, until TCP tries again.

It lives as long as its standard input is open, and takes the programs it started with it: whatever
happens to its owner, SIGKILL included, closes that pipe. Once it listens it writes ``{"port": N}``.

Only the standard library: the module runs with ``python -I -S``.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import sys
import time

BACKLOG = 1024
PAUSE_SECONDS = 0.02
"""When descriptors, memory or processes have run out: the connection waits in the backlog meanwhile."""


def listen(addresses: list[str]) -> list[socket.socket]:
    """A socket on each address, all with the same port, which the kernel chooses. Raises OSError."""
    for attempt in range(100):
        sockets: list[socket.socket] = []
        try:
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                listener = socket.socket(family, socket.SOCK_STREAM)
                sockets.append(listener)
                listener.bind((address, sockets[0].getsockname()[1]))
                listener.listen(BACKLOG)
                listener.setblocking(False)
        except OSError as error:
            for listener in sockets:
                listener.close()
            if error.errno != errno.EADDRINUSE or attempt == 99:
                raise OSError(error.errno, f"{address}: {error.strerror}") from error
        else:
            return sockets
    raise AssertionError


def _hand_over(connection: socket.socket, command: list[str]) -> None:
    ends = [(os.POSIX_SPAWN_DUP2, connection.fileno(), number) for number in (0, 1)]
    os.posix_spawn(command[0], command, os.environ, file_actions=ends, setsigdef=[signal.SIGCHLD])


def _serve(listener: socket.socket, command: list[str]) -> None:
    """Take one connection; whatever becomes of it, the next ones are served."""
    try:
        with listener.accept()[0] as connection:
            _hand_over(connection, command)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN):
            time.sleep(PAUSE_SECONDS)


def _main() -> None:
    orders = json.loads(sys.argv[1])
    try:
        sockets = listen(orders["addresses"])
    except OSError as error:
        print(json.dumps({"error": error.strerror}), flush=True)  # noqa: T201 (its answer)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps
    print(json.dumps({"port": sockets[0].getsockname()[1]}), flush=True)  # noqa: T201 (its answer)
    waiting: list[socket.socket | int] = [0, *sockets]
    while True:
        for ready in select.select(waiting, [], [])[0]:
            if not isinstance(ready, socket.socket):
                os.killpg(0, signal.SIGKILL)
            else:
                _serve(ready, orders["command"])


if __name__ == "__main__":
    _main()
