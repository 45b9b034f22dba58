"""Our init as PID 1 of a container: actions go over one kept stream, instead of an exec for each.

The container's stdin and stdout are the stream. We attach before it starts, so nothing is lost. When the
owner ends, the engine closes that stdin; then init exits, and the container with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import tarfile
from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CleanupError, ExecError
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.layers.command_defaults import CommandDefaults
from dutyfree.engine.sandbox.guest import Guest, with_variables
from dutyfree.substrates.docker import ending
from dutyfree.substrates.docker.engine import Engine, EngineError, EngineLost
from dutyfree.substrates.docker.gc import remove

PROGRAM = "/.dutyfree-init"
"""The path of init in the container."""

SAID = 500
"""Bytes of init's stderr that an error message may contain."""

HEAD_MAX = 1 << 16


def body(plain: Mapping[str, Any], *, mounted: bool) -> dict[str, Any]:
    """The request for a container whose PID 1 is init; ``plain`` is that for one without."""
    host = {**plain["HostConfig"], "Init": False}
    if mounted:
        # Mounts, not Binds: they fail if the engine does not see the file, instead of making a directory.
        mount = {"Type": "bind", "Source": str(BINARY), "Target": PROGRAM, "ReadOnly": True}
        host["Mounts"] = [*host.get("Mounts", ()), mount]
    return {
        **plain,
        "Entrypoint": [PROGRAM, "guest"],
        "User": "0:0",
        "HostConfig": host,
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
    }


def is_unseen(error: EngineError) -> bool:
    """Whether the engine refused a container because it does not see our file, as on another machine."""
    return "bind source path does not exist" in error.message


async def copy_program(engine: Engine, container: str) -> None:
    """Copy init into a container that has not started. Raises EngineError, EngineLost."""
    archive = await anyio.to_thread.run_sync(_archive)
    query = {"path": "/"}
    await engine.request(
        "PUT", f"/containers/{container}/archive", query=query, content=archive, size=len(archive.getvalue())
    )


def _archive() -> io.BytesIO:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        member = tarfile.TarInfo(PROGRAM.lstrip("/"))
        member.size, member.mode = BINARY.stat().st_size, 0o555
        with BINARY.open("rb") as file:
            tar.addfile(member, file)
    made.seek(0)
    return made


def defaults(image: Mapping[str, Any], container: str, home: str, path: str) -> CommandDefaults:
    """User and environment of commands, as the engine's own exec gives them. ``image``: its configuration."""
    given = dict(entry.partition("=")[::2] for entry in image.get("Env") or ())
    environment = {"PATH": path, "HOSTNAME": container[:12], **given, "HOME": home}
    return with_variables(CommandDefaults(environment, b"", image.get("User") or "", "", ()), {})


# --- The stream -------------------------------------------------------------------------------------------


class Demultiplexer:
    """Takes the engine's frames apart: stdout is init's stream, stderr is kept for messages."""

    def __init__(self) -> None:
        self._head = b""
        self._stream = 0
        self._missing = 0
        self._said = b""

    @property
    def said(self) -> str:
        return self._said.decode(errors="replace").strip()

    def decode(self, data: bytes) -> bytes:
        """The bytes of stdout in what was received."""
        if self._missing >= len(data) and self._stream == 1:  # the middle of a large frame
            self._missing -= len(data)
            return data
        found: list[bytes] = []
        at = 0
        while at < len(data):
            if self._missing == 0:
                take = 8 - len(self._head)
                self._head += data[at : at + take]
                at += take
                if len(self._head) < 8:
                    break
                self._stream = 2 if self._head[0] == 2 else 1
                self._missing = int.from_bytes(self._head[4:])
                self._head = b""
                continue
            part = data[at : at + self._missing]
            at += len(part)
            self._missing -= len(part)
            if self._stream == 1:
                found.append(part)
            else:
                self._said = (self._said + part)[-SAID:]
        return found[0] if len(found) == 1 else b"".join(found)


async def attach(engine: Engine, container: str) -> socket.socket:
    """Connect to the stdin, stdout and stderr of a container. Raises EngineError, EngineLost."""
    loop = asyncio.get_running_loop()
    connected = socket.socket(socket.AF_UNIX)
    connected.setblocking(False)
    target = f"{engine.prefix}/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1"
    lines = (f"POST {target} HTTP/1.1", "Host: docker", "Connection: Upgrade", "Upgrade: tcp")
    head = "\r\n".join((*lines, "Content-Length: 0", "", ""))
    try:
        with anyio.fail_after(engine.answer_seconds):
            await loop.sock_connect(connected, engine.path)
            await loop.sock_sendall(connected, head.encode())
            await _accepted(connected, container)
    except BaseException as error:
        connected.close()
        if isinstance(error, OSError):  # TimeoutError too
            raise EngineLost(f"the Docker engine at {engine.path} does not answer: {error}") from error
        raise
    return connected


async def _accepted(connected: socket.socket, container: str) -> None:
    """Read the head of the answer. One byte at a time would be slow, but nothing follows before the start."""
    loop = asyncio.get_running_loop()
    answer = b""
    while b"\r\n\r\n" not in answer and len(answer) < HEAD_MAX:
        received = await loop.sock_recv(connected, 4096)
        if not received:
            raise ConnectionResetError("it closed the connection")
        answer += received
    status = answer.split(b" ", 2)[1:2]
    if status not in ([b"101"], [b"200"]):
        said = answer.partition(b"\r\n\r\n")[2].decode(errors="replace").strip()
        number = int(status[0]) if status and status[0].isdigit() else 500
        raise EngineError(number, f"it does not attach to {container[:12]}: {said}")


# --- The sandbox ------------------------------------------------------------------------------------------


class ContainerControl:
    """Pause, continue and end one container. See ``GuestControl``."""

    freezer = True

    def __init__(self, engine: Engine, container: str) -> None:
        self._engine = engine
        self._container = container
        self._ending: asyncio.Task[None] | None = None

    async def freeze(self) -> None:
        try:
            await self._post("pause")
        except EngineError as error:
            raise ending.refusal(error, self._container) from error
        except EngineLost as error:
            raise ExecError(str(error)) from error

    async def thaw(self) -> None:
        # A container that has ended needs none; its stream says so.
        with contextlib.suppress(EngineError, EngineLost):
            await self._post("unpause")

    async def _post(self, operation: str) -> None:
        path = f"/containers/{self._container}/{operation}"
        await self._engine.request("POST", path, deadline=self._engine.answer_seconds)

    async def responds(self) -> bool:
        """Whether the engine answers soon."""
        with contextlib.suppress(EngineError, EngineLost):
            await self._engine.request("GET", "/_ping", deadline=self._engine.answer_seconds)
            return True
        return False

    def give_up(self) -> None:
        """Destroy it, without waiting for the end."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._remove())

    async def _remove(self) -> None:
        with contextlib.suppress(CleanupError):
            await self.destroy()

    async def destroy(self) -> None:
        await remove(self._engine, self._container)


async def attached(engine: Engine, container: str) -> Guest:
    """The init of a container that has not started. Raises EngineError, EngineLost."""
    connected = await attach(engine, container)
    streams = Demultiplexer()
    return Guest(
        container[:12],
        connected,
        ContainerControl(engine, container),
        decode=streams.decode,
        explain=lambda: ending.stream_reason(engine, container, streams.said),
    )
