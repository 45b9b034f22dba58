"""Real parts for tests of the network: a machine next door, a resolver that remembers, servers."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from dnslib import AAAA, QTYPE, RCODE, RR, A, DNSRecord
from dnslib.server import DNSLogger, DNSServer

BY = (
    "import socket, sys\ns = socket.create_connection((sys.argv[1], int(sys.argv[2])), 100)\n"
    "print(s.recv(99).decode())"
)
"""A program that says what it hears from an address and port."""


def reach(address: str, port: int) -> list[str]:
    return ["python3", "-c", BY, address, str(port)]


class Greeter:
    """A server on this machine that greets whoever comes, and counts them."""

    def __init__(self, address: str = "127.0.0.1", family: int = socket.AF_INET) -> None:
        greeter = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                greeter.visits += 1
                self.request.sendall(b"greetings")
                while self.request.recv(65536):
                    pass

        class Server(socketserver.ThreadingTCPServer):
            address_family = family
            daemon_threads = True
            request_queue_size = 1024

            def handle_error(self, *_: object) -> None:
                pass  # connections that are cut are what some tests are about

        self.visits = 0
        self._server = Server((address, 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def greeter(address: str = "127.0.0.1", family: int = socket.AF_INET) -> Iterator[Greeter]:
    made = Greeter(address, family)
    try:
        yield made
    finally:
        made.close()


class Resolver:
    """A name server on this machine, with names of its own, that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.names: dict[str, tuple[str, ...]] = {}
        self._server = DNSServer(
            self, address="127.0.0.1", port=0, logger=DNSLogger("-request,-reply,-truncated,-error")
        )
        self._server.start_thread()
        self.port: int = self._server.server.server_address[1]

    def resolve(self, request: DNSRecord, _: Any) -> DNSRecord:
        name, kind = str(request.q.qname).rstrip("."), QTYPE[request.q.qtype]
        self.asked.append(name)
        reply = request.reply()
        if name not in self.names:
            reply.header.rcode = RCODE.NXDOMAIN
        for address in self.names.get(name, ()):
            if kind == "A" and ":" not in address:
                reply.add_answer(RR(name, QTYPE.A, rdata=A(address), ttl=5))
            if kind == "AAAA" and ":" in address:
                number = tuple(socket.inet_pton(socket.AF_INET6, address))  # dnslib reads no ::ffff:127.0.0.1
                reply.add_answer(RR(name, QTYPE.AAAA, rdata=AAAA(number), ttl=5))
        return reply

    def close(self) -> None:
        self._server.stop()
        self._server.server.server_close()


class Neighbour:
    """Another machine, as far as the network is concerned: a namespace at the end of a cable."""

    def __init__(self, number: int) -> None:
        self._name = f"dfn{number}"
        subnet = f"10.{200 + number // 1200}.{number % 1200 // 8}.{number % 8 * 8}".rsplit(".", 1)
        first = int(subnet[1])
        self.here = f"{subnet[0]}.{first + 1}"
        self.address, self.other = f"{subnet[0]}.{first + 2}", f"{subnet[0]}.{first + 3}"
        self.address6 = f"fd99:{number:x}::2"
        self.metadata = f"fd00:ec2:{number:x}::2"
        """Beside the address of a cloud's metadata service."""
        self._number = number
        self._servers: list[subprocess.Popen[bytes]] = []

    def exists(self) -> bool:
        """One of its number: of another process, or left behind by one that was killed."""
        return os.path.lexists(f"/run/netns/{self._name}") or os.path.lexists(f"/sys/class/net/{self._name}")

    def connect(self) -> None:
        number, inside = self._number, ["netns", "exec", self._name, "ip"]
        for command in (
            ["netns", "add", self._name],
            ["link", "add", self._name, "type", "veth", "peer", "name", "eth0", "netns", self._name],
            ["addr", "add", f"{self.here}/29", "dev", self._name],
            ["-6", "addr", "add", f"fd99:{number:x}::1/64", "dev", self._name, "nodad"],
            ["link", "set", self._name, "up"],
            [*inside, "link", "set", "lo", "up"],
            [*inside, "link", "set", "eth0", "up"],
            [*inside, "addr", "add", f"{self.address}/29", "dev", "eth0"],
            [*inside, "addr", "add", f"{self.other}/29", "dev", "eth0"],
            [*inside, "-6", "addr", "add", f"{self.address6}/64", "dev", "eth0", "nodad"],
            [*inside, "-6", "addr", "add", f"{self.metadata}/128", "dev", "eth0", "nodad"],
            ["-6", "route", "add", f"{self.metadata}/128", "dev", self._name],
        ):
            subprocess.run(["ip", *command], check=True, capture_output=True)

    def answer_to(self, address: str) -> None:
        """Have one more address, and this machine a route to it."""
        family, bits = ("-6", 128) if ":" in address else ("-4", 32)
        inside = [
            "ip",
            "netns",
            "exec",
            self._name,
            "ip",
            family,
            "addr",
            "add",
            f"{address}/{bits}",
            "dev",
            "eth0",
        ]
        subprocess.run([*inside, "nodad"] if bits == 128 else inside, check=True, capture_output=True)
        route = ["ip", family, "route", "append", f"{address}/{bits}", "dev", self._name]
        subprocess.run(route, check=True, capture_output=True)

    def greet(self, port: int) -> None:
        """Start a server there, on every address, that says "neighbour"."""
        program = (
            "import socket\n"
            f"s = socket.create_server(('::', {port}), family=socket.AF_INET6, dualstack_ipv6=True)\n"
            "print(flush=True)\n"
            "while True:\n c, _ = s.accept()\n c.sendall(b'neighbour'); c.close()"
        )
        self._start(program)

    def _start(self, program: str) -> None:
        command = ["ip", "netns", "exec", self._name, sys.executable, "-c", program]
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
        self._servers.append(server)
        assert server.stdout is not None
        server.stdout.readline()

    def close(self) -> None:
        for server in self._servers:
            server.kill()
            server.communicate()
        subprocess.run(["ip", "link", "del", self._name], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self._name], check=False, capture_output=True)


def _numbers() -> Iterator[int]:
    for more in range(60_000):
        yield (os.getpid() + more) % 60_000


@contextlib.contextmanager
def neighbour() -> Iterator[Neighbour]:
    if not shutil.which("ip"):
        pytest.skip("ip is missing; to enable it: apt-get install iproute2")
    made = next(found for found in map(Neighbour, _numbers()) if not found.exists())
    try:
        made.connect()
        yield made
    finally:
        made.close()
