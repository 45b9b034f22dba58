"""E2B's API inside of a sandbox: processes, files and watches."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import logging
import posixpath
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route

from dutyfree.contract import Observation
from dutyfree.contract.errors import DutyfreeError, PathNotFound, SandboxClosed
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.server.bodies import LARGEST_REQUEST
from dutyfree.server.call_events import acted
from dutyfree.server.e2b import connect, signed_files
from dutyfree.server.e2b.connect import RpcError
from dutyfree.server.e2b.file_entries import FIELDS, LIST, TARGET, TYPES, entry_of
from dutyfree.server.e2b.processes import Command, CommandConfig, Commands, TerminalCommand
from dutyfree.server.e2b.template_steps import TemplateState
from dutyfree.server.e2b.watcher import Watcher, event_of
from dutyfree.server.json_form import json_response
from dutyfree.server.sandboxes import Held
from dutyfree.server.service import Service

SIGNALS = {"SIGNAL_SIGKILL": 9, "SIGNAL_SIGTERM": 15}
_log = logging.getLogger(__name__)

T = TypeVar("T")
Rpc = Callable[["Envd", Request], Awaitable[Response]]


class Envd:
    """What E2B clients have in one sandbox."""

    def __init__(self, held: Held, start: TemplateState, service: Service) -> None:
        """``start`` says where and as whom commands run that do not say it."""
        self.held = held
        self._start = start
        self.commands = Commands(held.sandbox)
        self._service = service
        self._followed: set[asyncio.Task[None]] = set()
        self.watchers: dict[str, Watcher] = {}

    @property
    def sandbox(self) -> NativeSandbox:
        if self.held.released:
            raise SandboxClosed("The sandbox was not found")
        return self.held.sandbox

    def path(self, given: str) -> str:
        """A path as E2B means it: relative ones begin in the working directory."""
        workdir = posixpath.join(self.held.sandbox.workdir, self._start.workdir or "")
        return posixpath.normpath(posixpath.join(workdir, given or "."))

    # --- Processes --------------------------------------------------------------------------------------

    async def start(self, request: Request) -> Response:
        wanted = await connect.streamed(request)
        config = self._config(request, wanted)
        if (pty := wanted.get("pty")) is not None:
            size = pty.get("size") or {}
            command: Command = await self.commands.open(config, size.get("rows", 24), size.get("cols", 80))
        else:
            command = await self.commands.start(config, stdin=bool(wanted.get("stdin", True)))
        task = asyncio.create_task(self._follow("start" if pty is None else "terminal", command))
        self._followed.add(task)
        task.add_done_callback(self._followed.discard)
        return connect.stream(_events(command, request, kill=True))

    def _config(self, request: Request, wanted: dict[str, Any]) -> CommandConfig:
        process = wanted.get("process") or {}
        words = (process.get("cmd", ""), *process.get("args", ()))
        cwd = self.path(process.get("cwd") or "")
        user = _user(request) or self._start.user
        return CommandConfig(words, process.get("envs") or {}, cwd, user, wanted.get("tag"))

    async def _follow(self, call: str, command: Command) -> None:
        """Publish how a command ends."""
        words = command.config.words
        label = words[-1] if "-c" in words else words
        with contextlib.suppress(DutyfreeError):
            await acted(self._service.events, call, label, self.held, command.wait())

    async def attach(self, request: Request) -> Response:
        wanted = await connect.streamed(request)
        command = self.commands.get(wanted.get("process") or {})
        return connect.stream(_events(command, request, kill=False))

    async def list_processes(self, request: Request) -> Response:
        await connect.unary(request)
        found = [
            {
                "pid": command.pid,
                "config": {
                    "cmd": command.config.words[0],
                    "args": list(command.config.words[1:]),
                    "envs": command.config.env,
                    **({} if command.config.cwd is None else {"cwd": command.config.cwd}),
                },
                **({} if command.config.tag is None else {"tag": command.config.tag}),
            }
            for command in self.commands.running()
        ]
        return json_response({"processes": found})

    async def send_input(self, request: Request) -> Response:
        wanted = await connect.unary(request)
        await self.commands.get(wanted.get("process") or {}).write(_input(wanted))
        return json_response({})

    async def stream_input(self, request: Request) -> Response:
        """Write what a client sends, while it sends."""
        command: Command | None = None
        async for message in connect.messages(request):
            if (begun := message.get("start")) is not None:
                command = self.commands.get(begun.get("process") or {})
            elif (data := message.get("data")) is not None:
                if command is None:
                    raise RpcError("invalid_argument", "the first message must name the process")
                await command.write(_input(data))
        return connect.stream(_nothing())

    async def close_stdin(self, request: Request) -> Response:
        wanted = await connect.unary(request)
        await self.commands.get(wanted.get("process") or {}).close_stdin()
        return json_response({})

    async def send_signal(self, request: Request) -> Response:
        wanted = await connect.unary(request)
        number = SIGNALS.get(wanted.get("signal", ""))
        if number is None:
            raise RpcError("invalid_argument", f"there is no signal {wanted.get('signal')!r}")
        await self.commands.get(wanted.get("process") or {}).signal(number)
        return json_response({})

    async def update(self, request: Request) -> Response:
        wanted = await connect.unary(request)
        command = self.commands.get(wanted.get("process") or {})
        size = (wanted.get("pty") or {}).get("size") or {}
        if isinstance(command, TerminalCommand):
            await command.resize(size.get("rows", 24), size.get("cols", 80))
        return json_response({})

    # --- Files ------------------------------------------------------------------------------------------

    async def stat(self, request: Request) -> Response:
        wanted = await connect.unary(request)
        return json_response({"entry": await self.entry(wanted.get("path", ""))})

    async def entry(self, given: str) -> dict[str, Any]:
        """Raises RpcError if there is nothing."""
        path = self.path(given)
        seen = await self.sandbox.exec(["stat", "-c", FIELDS.removesuffix("\t%n"), "--", path])
        if not seen.ok:
            raise RpcError("not_found", f"{given}: no such file or directory")
        found = entry_of(f"{seen.stdout.decode().rstrip()}\t{path}")
        assert found is not None
        return await self._resolved(found)

    async def directory(self, given: str) -> str:
        """The path of a directory. Raises RpcError if there is none."""
        entry = await self.entry(given)
        if entry["type"] != "FILE_TYPE_DIRECTORY":
            raise RpcError("invalid_argument", f"{given}: not a directory")
        return str(entry["path"])

    async def list_directory(self, request: Request) -> Response:
        wanted = await connect.unary(request)
        path, depth = self.path(wanted.get("path", "")), wanted.get("depth") or 1
        await self.sandbox.list(path)  # raises what is wrong with the directory
        seen = await self.sandbox.exec(["/bin/sh", "-c", LIST, "sh", path, str(depth)])
        return json_response({"entries": await self._entries(seen)})

    async def _entries(self, seen: Observation) -> list[dict[str, Any]]:
        text = seen.stdout.decode(errors="replace")
        lines = text.split("\0") if "\0" in text else text.splitlines()
        entries = [entry for line in lines if (entry := entry_of(line)) is not None]
        return sorted([await self._resolved(entry) for entry in entries], key=lambda entry: entry["path"])

    async def _resolved(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Of a link, E2B shows the type of what it leads to."""
        if entry["type"] == "FILE_TYPE_SYMLINK":
            seen = await self.sandbox.exec(["/bin/sh", "-c", TARGET, "sh", entry["path"]])
            mode, _, target = seen.stdout.decode(errors="replace").rstrip("\n").partition("\t")
            entry["symlinkTarget"] = target
            if mode:  # it leads to something
                entry["type"] = TYPES.get(int(mode, 16) & 0o170000, "FILE_TYPE_UNSPECIFIED")
        return entry

    async def make_directory(self, request: Request) -> Response:
        wanted = await connect.unary(request)
        path = self.path(wanted.get("path", ""))
        script = '[ -d "$1" ] && exit 17; [ -e "$1" ] && exit 20; exec mkdir -p -- "$1"'
        seen = await self.sandbox.exec(["/bin/sh", "-c", script, "sh", path])
        if seen.exit_code == 17:
            raise RpcError("already_exists", f"directory already exists: {path}")
        if not seen.ok:
            raise RpcError("invalid_argument", seen.stderr.decode(errors="replace") or f"{path} is a file")
        return json_response({"entry": await self.entry(path)})

    async def move(self, request: Request) -> Response:
        wanted = await connect.unary(request)
        source, target = (self.path(wanted.get(name, "")) for name in ("source", "destination"))
        await self.entry(source)  # raises RpcError
        script = 'mkdir -p -- "$(dirname -- "$2")" && exec mv -T -- "$1" "$2"'
        seen = await self.sandbox.exec(["/bin/sh", "-c", script, "sh", source, target])
        if not seen.ok:
            raise RpcError("invalid_argument", seen.stderr.decode(errors="replace"))
        return json_response({"entry": await self.entry(target)})

    async def remove(self, request: Request) -> Response:
        """A path that does not exist is removed already."""
        wanted = await connect.unary(request)
        with contextlib.suppress(PathNotFound):
            await self.sandbox.remove(self.path(wanted.get("path", "")))
        return json_response({})

    async def read(self, request: Request) -> Response:
        path = self.path(request.query_params.get("path", ""))
        data = await self.sandbox.read(path, largest=LARGEST_REQUEST)
        return Response(data, media_type="application/octet-stream")

    async def write(self, request: Request) -> Response:
        """One file as the body, or several as a form, whose names are their paths."""
        path, encoding = request.query_params.get("path"), request.headers.get("content-encoding")
        written = []
        if request.headers.get("content-type", "").startswith("multipart/"):
            async with request.form() as form:
                for part in form.getlist("file"):
                    assert isinstance(part, UploadFile)
                    at = self.path(path or part.filename or "")
                    await self.sandbox.write(at, await part.read())
                    written.append(at)
        else:
            at = self.path(path or "")
            await self._write(at, await request.body(), zipped=encoding == "gzip")
            written.append(at)
        return json_response([{"path": at, "name": posixpath.basename(at), "type": "file"} for at in written])

    async def _write(self, path: str, data: bytes, *, zipped: bool) -> None:
        if not zipped:
            await self.sandbox.write(path, data)
            return
        size = connect.unzipped_size(data)
        with self._service.quotas.bytes.held(self.held.tenant, size):
            await self.sandbox.write(path, await anyio.to_thread.run_sync(connect.unzipped, data, size))

    # --- Watches ----------------------------------------------------------------------------------------

    async def watch(self, request: Request) -> Response:
        wanted = await connect.streamed(request)
        return connect.stream(self._changes(wanted, request))

    async def _changes(self, wanted: dict[str, Any], request: Request) -> AsyncIterator[dict[str, Any]]:
        path = await self.directory(wanted.get("path", ""))
        async with self.sandbox.watch(path, recursive=bool(wanted.get("recursive"))) as changes:
            yield {"start": {}}
            async for change in connect.in_time(changes, connect.deadline(request)):
                if (event := event_of(change)) is not None:
                    yield {"filesystem": event}

    async def create_watcher(self, request: Request) -> Response:
        wanted = await connect.unary(request)
        path = await self.directory(wanted.get("path", ""))
        watcher = Watcher(self.sandbox, path, recursive=bool(wanted.get("recursive")))
        await watcher.begun()
        name = secrets.token_hex(8)
        self.watchers[name] = watcher
        return json_response({"watcherId": name})

    async def watcher_events(self, request: Request) -> Response:
        wanted = await connect.unary(request)
        return json_response({"events": self._watcher(wanted).take()})

    async def remove_watcher(self, request: Request) -> Response:
        wanted = await connect.unary(request)
        self._watcher(wanted).end()
        del self.watchers[wanted["watcherId"]]
        return json_response({})

    def _watcher(self, wanted: dict[str, Any]) -> Watcher:
        watcher = self.watchers.get(wanted.get("watcherId", ""))
        if watcher is None:
            raise RpcError("not_found", "there is no such watcher")
        return watcher


class EnvdRoutes:
    """The routes of E2B's SDK for what is in a sandbox. It names the sandbox in a header."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._envds: dict[str, Envd] = {}

    def routes(self) -> list[Route]:
        calls: dict[str, tuple[str, Rpc]] = {
            "/process.Process/Start": ("POST", Envd.start),
            "/process.Process/Connect": ("POST", Envd.attach),
            "/process.Process/List": ("POST", Envd.list_processes),
            "/process.Process/SendInput": ("POST", Envd.send_input),
            "/process.Process/StreamInput": ("POST", Envd.stream_input),
            "/process.Process/CloseStdin": ("POST", Envd.close_stdin),
            "/process.Process/SendSignal": ("POST", Envd.send_signal),
            "/process.Process/Update": ("POST", Envd.update),
            "/filesystem.Filesystem/Stat": ("POST", Envd.stat),
            "/filesystem.Filesystem/ListDir": ("POST", Envd.list_directory),
            "/filesystem.Filesystem/MakeDir": ("POST", Envd.make_directory),
            "/filesystem.Filesystem/Move": ("POST", Envd.move),
            "/filesystem.Filesystem/Remove": ("POST", Envd.remove),
            "/filesystem.Filesystem/WatchDir": ("POST", Envd.watch),
            "/filesystem.Filesystem/CreateWatcher": ("POST", Envd.create_watcher),
            "/filesystem.Filesystem/GetWatcherEvents": ("POST", Envd.watcher_events),
            "/filesystem.Filesystem/RemoveWatcher": ("POST", Envd.remove_watcher),
        }
        return [
            Route("/health", self._guarded(_healthy), methods=["GET"]),
            Route("/files", self._guarded(Envd.read), methods=["GET"]),
            Route("/files", self._guarded(Envd.write), methods=["POST"]),
            *(Route(path, self._guarded(rpc), methods=[verb]) for path, (verb, rpc) in calls.items()),
        ]

    def _guarded(self, rpc: Rpc) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                envd = self._envd(request)
                self._service.check_draining()
                with self._service.quotas.call(envd.held.tenant):
                    return await rpc(envd, request)
            except ClientDisconnect:
                return Response(status_code=499)
            except RpcError as error:
                return connect.refusal(error)
            except DutyfreeError as error:
                return connect.refusal(connect.rpc_error(error))
            except Exception as error:  # noqa: BLE001 (a defect, which is logged)
                _log.exception("%s failed", request.url.path)
                return connect.refusal(RpcError("internal", f"the server failed: {type(error).__name__}"))

        return guarded

    def _envd(self, request: Request) -> Envd:
        """The sandbox of a request, which has the access token of the creation. Raises RpcError."""
        held = self._authenticated(request)
        name = held.id
        envd = self._envds.get(name)
        if envd is None:
            self._envds = {one: kept for one, kept in self._envds.items() if not kept.held.released}
            start = self._service.templates.state(held.tenant, held.template)
            envd = self._envds[name] = Envd(held, start, self._service)
        return envd

    def _authenticated(self, request: Request) -> Held:
        name = request.headers.get("e2b-sandbox-id", "")
        if not name and signed_files.signed(request):
            return signed_files.signer(request, self._service.sandboxes.all())
        held = self._service.sandboxes.find(name)
        if held is None:
            self._envds.pop(name, None)
            raise RpcError("unavailable", "The sandbox was not found")
        given = request.headers.get("x-access-token", "")
        if not secrets.compare_digest(given.encode(), held.access_token.encode()):
            raise RpcError("unauthenticated", "the access token of the sandbox is not valid")
        return held


def tenant_of(service: Service, connection: HTTPConnection) -> str | None:
    """The tenant of the sandbox whose access token a request has."""
    held = service.sandboxes.find(connection.headers.get("e2b-sandbox-id", ""))
    given = connection.headers.get("x-access-token", "")
    if held is None or not secrets.compare_digest(given.encode(), held.access_token.encode()):
        return None
    return held.tenant


async def _healthy(envd: Envd, _request: Request) -> Response:
    """A paused sandbox does not run."""
    if envd.sandbox.paused:
        raise RpcError("unavailable", "The sandbox is paused")
    return Response(status_code=204)


def _user(request: Request) -> str | None:
    """The user that a request names. E2B's usual one stands for the image's own."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        name = binascii.a2b_base64(value).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        return None
    return None if name in ("", "user") else name


def _input(message: dict[str, Any]) -> bytes:
    given = message.get("input") or {}
    return binascii.a2b_base64(given.get("stdin") or given.get("pty") or "")


async def _nothing() -> AsyncIterator[dict[str, Any]]:
    """The one message of an answer that says nothing."""
    yield {}


async def _events(command: Command, request: Request, *, kill: bool) -> AsyncIterator[dict[str, Any]]:
    """The life of a command as events. ``kill``: what is left at the deadline of the call is killed."""
    yield {"event": {"start": {"pid": command.pid}}}
    try:
        async for stream, data in connect.in_time(command.output(), connect.deadline(request)):
            text = binascii.b2a_base64(data, newline=False).decode()
            yield {"event": {"data": {stream: text}}}
        seen = await command.wait()
    except RpcError:
        if kill:
            with contextlib.suppress(DutyfreeError):
                await command.signal(9)
        raise
    end: dict[str, Any] = {
        "exitCode": seen.exit_code,
        "exited": seen.signal is None,
        "status": f"exit status {seen.exit_code}" if seen.signal is None else f"signal {seen.signal}",
    }
    if not seen.ok:
        end["error"] = end["status"]
    yield {"event": {"end": end}}
