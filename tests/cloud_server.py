"""A cloud on loopback: moto's EC2 server, and machines that take from their user data what cloud-init would.

moto's instances do not run. ``ssh`` reaches one by a ProxyCommand, as it reaches an instance without a public
address: ``cloud_machine`` runs an sshd with the host key and the login of the instance's user data.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen

import pytest

from tests.processes import eventually
from tests.ssh_server import SSHD

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLEOFTESTS", "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tests"}
IMAGE = "ami-12c6146b"
"""An image that moto has."""


class CloudServer:
    """A server that runs."""

    def __init__(self, root: Path, moto: str, front: _Front) -> None:
        self.root = root
        self.moto = moto
        self.front = front
        self.url = f"http://127.0.0.1:{front.server_port}"

    @property
    def options(self) -> dict[str, Any]:
        """The options of the substrate ``cloud``."""
        return {
            "endpoint": self.url,
            "image": IMAGE,
            "region": "us-east-1",
            "address": "id",
            "ssh_config": str(self.root / "ssh_config"),
            "user": _user(),
            "poll_seconds": 0.05,
            "boot_seconds": 60,
        }

    @contextmanager
    def deciding(self, decide: Decide) -> Iterator[None]:
        """Lose or refuse some requests, for as long as the context."""
        self.front.decide = decide
        try:
            yield
        finally:
            self.front.decide = lambda _: None

    def client(self) -> Any:
        """Another program's view: Amazon's own library."""
        import boto3

        return boto3.client(
            "ec2",
            endpoint_url=self.moto,
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
        )

    def instances(self) -> list[dict[str, Any]]:
        pages = self.client().describe_instances()["Reservations"]
        return [one for page in pages for one in page["Instances"]]

    def living(self) -> list[str]:
        """The ids of instances that would cost money."""
        ended = ("terminated", "shutting-down")
        return [one["InstanceId"] for one in self.instances() if one["State"]["Name"] not in ended]


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name


@contextmanager
def cloud_server(root: Path, **environment: str) -> Iterator[CloudServer]:
    """Start a server. Skips without an sshd."""
    if not SSHD or not shutil.which("ssh"):
        pytest.skip("no sshd; to enable it: apt-get install openssh-server openssh-client")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it separates its privileges
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    machine = Path(__file__).with_name("cloud_machine.py")
    proxy = f"{sys.executable} -I -S {machine} {url} {root} %h"
    (root / "ssh_config").write_text(f"Host *\n  ProxyCommand {proxy}\n")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (
        (root / "moto.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment}) as process,
    ):
        try:
            assert eventually(lambda: _answers(port) or process.poll() is not None)
            assert process.poll() is None, (root / "moto.log").read_text()
            with _front(url) as front:
                yield CloudServer(root, url, front)
        finally:
            process.kill()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except OSError:
        return False
    return True


# --- Before the server --------------------------------------------------------------------------------------

Decide = Callable[[str], "str | tuple[int, str] | None"]
"""What happens to a request of this action: None forwards it, "lose" forwards it and loses the answer,
"refuse" loses the request, and a status with a code is an error of our own, as EC2 writes them."""

PLAIN = b'xmlns="http://ec2.amazonaws.com/doc/2016-11-15"'
"""As moto writes it. EC2 ends it with a slash, and leaves it out of errors, as libcloud expects."""


class _Front(ThreadingHTTPServer):
    """Answers as EC2 does, from moto's answers; and loses some, as a network does."""

    def __init__(self, moto: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.moto = moto
        self.decide: Decide = lambda _: None


class _Handler(BaseHTTPRequestHandler):
    server: _Front

    def do_GET(self) -> None:
        decided = self.server.decide(parse_qs(urlsplit(self.path).query)["Action"][0])
        if decided == "refuse":
            return
        status, body = _error(*decided) if isinstance(decided, tuple) else self._forwarded()
        if decided == "lose":
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _forwarded(self) -> tuple[int, bytes]:
        headers = {name: value for name, value in self.headers.items() if name != "Host"}
        try:
            with urlopen(Request(self.server.moto + self.path, headers=headers)) as answer:
                return answer.status, answer.read().replace(PLAIN, PLAIN[:-1] + b'/"')
        except HTTPError as error:
            return error.code, error.read().replace(b" " + PLAIN, b"")

    def log_message(self, *_: object) -> None:
        pass


def _error(status: int, code: str) -> tuple[int, bytes]:
    said = f"<Error><Code>{code}</Code><Message>of the test</Message></Error>"
    return status, f"<Response><Errors>{said}</Errors><RequestID>1</RequestID></Response>".encode()


@contextmanager
def _front(moto: str) -> Iterator[_Front]:
    with _Front(moto) as front:
        thread = threading.Thread(target=front.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield front
        finally:
            front.shutdown()
            thread.join()
