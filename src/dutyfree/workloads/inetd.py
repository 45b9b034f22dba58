"""A process that listens, and starts a program for each connection, as inetd does.

git daemon can listen itself, but with a backlog of five: of 32 clones that start together, some wait a whole
second for the TCP retry.

The process ends when its standard input is closed, and kills the programs that it started. The owner holds
the other end of that pipe, so it also closes if the owner is killed. When it listens, it prints ``{"port":
N}``.

It runs with ``python -I -S``, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import sys
import threading
import time

BACKLOG = 1024
CHUNK = 256 << 10
PAUSE_SECONDS = 0.02
"""Pause if descriptors, memory or processes run out. The connection waits in the backlog."""


def listen(addresses: list[str]) -> list[socket.socket]:
    """Listen on each address, with the same port, which the kernel chooses. Raises OSError."""
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


def _start(program: socket.socket, command: list[str]) -> None:
    """Start the command with a socket as its standard input and output."""
    ends = [(os.POSIX_SPAWN_DUP2, program.fileno(), number) for number in (0, 1)]
    os.posix_spawn(command[0], command, os.environ, file_actions=ends, setsigdef=[signal.SIGCHLD])


def _serve(listener: socket.socket, command: list[str]) -> None:
    """Accept one connection. An error does not affect the next ones."""
    try:
        client = listener.accept()[0]
        ours, program = socket.socketpair()
        with program:
            _start(program, command)
    except OSError as error:
        _pause(error)
        return
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for source, sink in ((client, ours), (ours, client)):
        threading.Thread(target=_forward, args=(source, sink), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    """Forward all bytes and then the end, and acknowledge what comes over TCP at once.

    git sends many small packets, and each waits until the one before is acknowledged (Nagle's algorithm). The
    kernel delays that acknowledgement by 40 ms, and only on some substrates, so a clone would measure the
    timers of TCP. The option does not last, so it is set after each read.
    """
    try:
        while data := source.recv(CHUNK):
            if source.family != socket.AF_UNIX:
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # one side is gone: let the other one know
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _pause(error: OSError) -> None:
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN):
        time.sleep(PAUSE_SECONDS)


def _main() -> None:
    arguments = json.loads(sys.argv[1])
    try:
        sockets = listen(arguments["addresses"])
    except OSError as error:
        print(json.dumps({"error": error.strerror}), flush=True)  # noqa: T201 (read by the owner)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    print(json.dumps({"port": sockets[0].getsockname()[1]}), flush=True)  # noqa: T201 (read by the owner)
    waiting: list[socket.socket | int] = [0, *sockets]
    while True:
        for ready in select.select(waiting, [], [])[0]:
            if not isinstance(ready, socket.socket):
                os.killpg(0, signal.SIGKILL)
            else:
                _serve(ready, arguments["command"])


if __name__ == "__main__":
    _main()
