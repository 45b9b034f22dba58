"""P10: the server compared with the engine in the same process, on the loopback."""

from __future__ import annotations

import http.client
import json
import socket
from urllib.parse import urlsplit

from rounds import Row, interleaved, ratio

import dutyfree

SIZE = 4096


async def service(rounds: int) -> list[Row]:
    """P10a: exec over HTTP; P10b: over the channel; P10c: a file of 4 KiB; P10d: create to first result."""
    async with (
        dutyfree.open("native") as native,
        dutyfree.open("hosted", serve=True) as hosted,
        native.sandbox() as inside,
        hosted.sandbox() as remote,
    ):
        connection = _connected(hosted.url)
        body = json.dumps({"command": ["/bin/true"]})

        async def over_http() -> None:
            connection.request("POST", f"/v1/sandboxes/{remote.id}/exec", body)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()

        async def created_inside() -> None:
            async with native.sandbox() as made:
                await made.exec(["/bin/true"])

        async def created_remotely() -> None:
            async with hosted.sandbox() as made:
                await made.exec(["/bin/true"])

        await inside.write("file", bytes(SIZE))
        await remote.write("file", bytes(SIZE))
        found = await interleaved(
            rounds,
            {
                "exec": lambda: _done(inside.exec(["/bin/true"])),
                "channel": lambda: _done(remote.exec(["/bin/true"])),
                "http": over_http,
                "read": lambda: _done(inside.read("file")),
                "read channel": lambda: _done(remote.read("file")),
                "create": created_inside,
                "create channel": created_remotely,
            },
        )
    return [
        ratio("P10a", "exec over HTTP ÷ in-process exec", found["http"], found["exec"], at_most=2),
        ratio(
            "P10b", "exec over the channel ÷ in-process exec", found["channel"], found["exec"], at_most=1.5
        ),
        ratio(
            "P10c",
            "read 4 KiB over the channel ÷ in-process",
            found["read channel"],
            found["read"],
            at_most=2,
        ),
        ratio(
            "P10d",
            "create, exec, end over the channel ÷ in-process",
            found["create channel"],
            found["create"],
        ),
    ]


async def _done(action: object) -> None:
    await action  # type: ignore[misc]


def _connected(url: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
