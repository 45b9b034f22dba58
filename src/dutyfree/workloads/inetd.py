"""A process that listens, and starts a program for each connection, as inetd does.

git daemon can listen itself, but with a backlog of five: of 32 clones that start together, some wait a whole
second for the TCP retry.

The process ends when its standard input is closed, and kills the programs that it started. The owner holds
the other end of that pipe, so it also closes if the owner is killed. When it listens, it prints ``{"port":
N}``.

It runs with ``python -I -S``, so it uses the standard library only.
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


def _start(connection: socket.socket, command: list[str]) -> int:
    """Start the program on a connection. Returns its pid."""
    ends = [(os.POSIX_SPAWN_DUP2, connection.fileno(), number) for number in (0, 1)]
    return os.posix_spawn(command[0], command, os.environ, file_actions=ends)


class Server:
    """Listeners, and the connections whose programs run.

    git sends many small packets, and each waits until the one before is acknowledged (Nagle's algorithm). The
    kernel delays that acknowledgement by 40 ms, and only on some substrates, so a clone would measure the
    timers of TCP. So this process watches the connections besides the programs, and acknowledges at once.
    """

    def __init__(self, sockets: list[socket.socket], command: list[str]) -> None:
        self._command = command
        self._events = select.epoll()
        self._events.register(0)
        self._listeners = {listener.fileno(): listener for listener in sockets}
        self._connections: dict[int, socket.socket] = {}
        self._programs: dict[int, tuple[int, int]] = {}
        """By the descriptor of a program (pidfd): its pid and its connection."""
        for number in self._listeners:
            self._events.register(number, select.EPOLLIN)

    def run(self) -> None:
        """Serve until standard input is closed."""
        while True:
            for ready, _ in self._events.poll():
                if ready == 0:
                    os.killpg(0, signal.SIGKILL)
                elif ready in self._listeners:
                    self._accept(self._listeners[ready])
                elif ready in self._connections:
                    self._connections[ready].setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
                elif ready in self._programs:
                    self._ended(ready)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection. An error does not affect the next ones."""
        try:
            connection = listener.accept()[0]
        except OSError as error:
            _pause(error)
            return
        try:
            pid = _start(connection, self._command)
            program = os.pidfd_open(pid)
        except OSError as error:
            connection.close()
            _pause(error)
            return
        self._connections[connection.fileno()] = connection
        self._programs[program] = (pid, connection.fileno())
        self._events.register(connection.fileno(), select.EPOLLIN | select.EPOLLET)
        self._events.register(program, select.EPOLLIN)

    def _ended(self, program: int) -> None:
        """Close the connection of a program that has ended."""
        pid, connection = self._programs.pop(program)
        os.waitpid(pid, 0)
        os.close(program)
        self._connections.pop(connection).close()


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
    server = Server(sockets, arguments["command"])
    print(json.dumps({"port": sockets[0].getsockname()[1]}), flush=True)  # noqa: T201 (read by the owner)
    server.run()


if __name__ == "__main__":
    _main()
