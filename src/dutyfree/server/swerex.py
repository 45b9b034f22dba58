"""The remote runtime of SWE-ReX: each name below ``/swerex/`` is one sandbox, as one of its servers is.

A sandbox is created at the first request, and ends with ``close``, or ``LEASE`` seconds after the last one.
The name is the idempotency key of its creation. So the next server goes on with it, and a sandbox that was
lost is not replaced by an empty one: requests for its name fail until ``close``.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import posixpath
import zipfile
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal
from weakref import WeakValueDictionary

import anyio.to_thread
import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dutyfree.contract.errors import ActionError, DutyfreeError, LeaseEnded, Restarting
from dutyfree.engine.sandbox.shell import NativeShell
from dutyfree.server import json_form
from dutyfree.server.access import Access, Refused
from dutyfree.server.bodies import LARGEST_REQUEST
from dutyfree.server.call_events import acted
from dutyfree.server.handlers import HANDLERS, DirectCall
from dutyfree.server.json_form import json_response
from dutyfree.server.sandboxes import Held
from dutyfree.server.service import Service
from dutyfree.wire import calls

LEASE = 3600.0
EXTEND_SECONDS = 60.0
"""How often the lease is extended while a request runs."""
ERRORS = "swerex.exceptions"
MOST_MEMBERS = 100_000
"""Members of an archive."""
_MEMBER = b"PK\x01\x02"
"""Begins the entry of each member in the directory of an archive."""
_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""What can be unpacked within a bound of memory."""
_INVALID = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, OverflowError)
"""What zipfile raises for an archive that is not valid: the last two for impossible names and offsets."""


class SwerexError(Exception):
    """An error that the client raises as the exception ``path``."""

    def __init__(self, path: str, message: str, extra: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.extra = extra or {}


class Session(msgspec.Struct, frozen=True):
    session: str = "default"
    startup_source: tuple[str, ...] = ()


class SessionAction(msgspec.Struct, frozen=True):
    command: str = ""
    session: str = "default"
    timeout: float | None = None
    is_interactive_command: bool = False
    is_interactive_quit: bool = False
    check: Literal["silent", "raise", "ignore"] = "raise"
    error_msg: str = ""
    action_type: str = "bash"


class Command(msgspec.Struct, frozen=True):
    command: str | list[str]
    timeout: float | None = None
    shell: bool = False
    check: bool = False
    error_msg: str = ""
    env: dict[str, str] | None = None
    cwd: str | None = None
    merge_output_streams: bool = False


class FileRequest(msgspec.Struct, frozen=True):
    path: str
    content: str = ""
    encoding: str | None = None
    errors: str | None = None


class Runtime:
    """One sandbox, and the shells in it."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.shells: dict[str, OpenShell] = {}

    def shell(self, name: str) -> NativeShell:
        """Raises SwerexError."""
        if name not in self.shells:
            raise SwerexError(f"{ERRORS}.SessionDoesNotExistError", f"session {name!r} does not exist")
        return self.shells[name].shell


class OpenShell:
    """A shell that a task of its own holds open: the task that opens a context must also leave it."""

    shell: NativeShell

    def __init__(self, held: Held) -> None:
        self._leave = asyncio.Event()
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(held))

    async def _hold(self, held: Held) -> None:
        try:
            async with held.sandbox.shell("/bin/bash") as self.shell:
                self._opened.set_result(None)
                await self._leave.wait()
        except DutyfreeError as error:
            if not self._opened.done():
                self._opened.set_exception(error)

    async def opened(self) -> None:
        await self._opened

    async def close(self) -> None:
        self._leave.set()
        await asyncio.wait([self._task])


Endpoint = Callable[["SwerexRoutes", Request, Runtime], Awaitable[Any]]
Answer = Callable[[Request, str], Awaitable[Any]]
"""What a request of a tenant returns."""


class SwerexRoutes:
    """The routes of SWE-ReX's server, once for each name."""

    def __init__(self, service: Service, access: Access, extend_seconds: float = EXTEND_SECONDS) -> None:
        self._service = service
        self._access = access
        self._extend_seconds = extend_seconds
        self._runtimes: dict[tuple[str, str], Runtime] = {}
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def routes(self) -> list[Route]:
        endpoints: list[tuple[str, str, Endpoint]] = [
            ("GET", "is_alive", SwerexRoutes.is_alive),
            ("POST", "create_session", SwerexRoutes.create_session),
            ("POST", "run_in_session", SwerexRoutes.run_in_session),
            ("POST", "close_session", SwerexRoutes.close_session),
            ("POST", "execute", SwerexRoutes.execute),
            ("POST", "read_file", SwerexRoutes.read_file),
            ("POST", "write_file", SwerexRoutes.write_file),
            ("POST", "upload", SwerexRoutes.upload),
        ]
        return [
            Route("/swerex/{name}/close", self._guarded(self.close), methods=["POST"]),
            *(
                Route(f"/swerex/{{name}}/{path}", self._guarded(self._in_runtime(endpoint)), methods=[verb])
                for verb, path, endpoint in endpoints
            ),
        ]

    def _guarded(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                tenant = await self._access.tenant(request)
                self._service.check_draining()
                with self._service.quotas.call(tenant):
                    return json_response(await answer(request, tenant))
            except Refused as error:
                return json_response({"detail": str(error)}, error.status)
            except Restarting as error:
                return json_response({"detail": str(error)}, 503)
            except SwerexError as error:
                return _transferred(error)
            except FileNotFoundError as error:
                return _transferred(SwerexError("builtins.FileNotFoundError", str(error)))
            except DutyfreeError as error:
                return _transferred(SwerexError(f"{ERRORS}.SwerexException", str(error)))

        return guarded

    def _in_runtime(self, endpoint: Endpoint) -> Answer:
        async def answer(request: Request, tenant: str) -> Any:
            runtime = await self._runtime(tenant, request.path_params["name"])
            async with self._kept_alive(runtime.held):
                return await endpoint(self, request, runtime)

        return answer

    def _lock(self, tenant: str, name: str) -> asyncio.Lock:
        """Held while the sandbox of a name begins or ends: each name has its own."""
        return self._locks.setdefault((tenant, name), asyncio.Lock())

    async def _runtime(self, tenant: str, name: str) -> Runtime:
        """The sandbox of a name, which the first request creates. Raises SwerexError if it has ended."""
        async with self._lock(tenant, name):
            runtime = self._runtimes.get((tenant, name))
            if runtime is None or runtime.held.released:
                held = self._adopted(tenant, name) or await self._created(tenant, name)
                self._runtimes = {key: one for key, one in self._runtimes.items() if not one.held.released}
                runtime = self._runtimes[tenant, name] = Runtime(held)
        return runtime

    def _adopted(self, tenant: str, name: str) -> Held | None:
        """The sandbox that an earlier server created. Its label does not do: forks have it too."""
        for held in self._service.sandboxes.of(tenant):
            if held.creation.request == (tenant, _key(name)):
                return held
        return None

    async def _created(self, tenant: str, name: str) -> Held:
        """Raises SwerexError if there was one before that has ended."""
        call = calls.Create(key=_key(name), labels={"swerex": name}, lease=LEASE)
        try:
            (made,) = await HANDLERS["create"](DirectCall(self._service, tenant), call)
        except LeaseEnded as error:
            message = f"the sandbox of {name[:80]!r} has ended; to get a new one, call close first"
            raise SwerexError(f"{ERRORS}.SwerexException", message) from error
        return self._service.sandboxes.get(tenant, made.id)

    @asynccontextmanager
    async def _kept_alive(self, held: Held) -> AsyncIterator[None]:
        """Extend the lease while a request runs: a command may take longer than a lease."""
        self._service.sandboxes.keep_alive(held, LEASE)
        extending = asyncio.create_task(self._extend(held))
        try:
            yield
        finally:
            extending.cancel()

    async def _extend(self, held: Held) -> None:
        while True:
            await asyncio.sleep(self._extend_seconds)
            if held.released:
                return
            self._service.sandboxes.keep_alive(held, LEASE)

    # --- Requests ---------------------------------------------------------------------------------------

    async def is_alive(self, _request: Request, runtime: Runtime) -> dict[str, Any]:
        return {"is_alive": runtime.held.sandbox.alive, "message": ""}

    async def create_session(self, request: Request, runtime: Runtime) -> dict[str, Any]:
        wanted = await _body(request, Session)
        if wanted.session in runtime.shells:
            raise SwerexError(f"{ERRORS}.SessionExistsError", f"session {wanted.session!r} already exists")
        opened = OpenShell(runtime.held)
        await opened.opened()
        runtime.shells[wanted.session] = opened
        output = ""
        for path in wanted.startup_source:
            seen = await opened.shell.run(f". {path}", timeout=60)
            output += seen.stdout.decode(errors="replace")
        return {"output": output, "session_type": "bash"}

    async def run_in_session(self, request: Request, runtime: Runtime) -> dict[str, Any]:
        wanted = await _body(request, SessionAction)
        shell = runtime.shell(wanted.session)
        if wanted.action_type != "bash" or wanted.is_interactive_command or wanted.is_interactive_quit:
            raise SwerexError(
                f"{ERRORS}.SwerexException", "interactive programs in a session are not supported here"
            )
        try:
            work = shell.run(f"{{\n{wanted.command}\n}} 2>&1", timeout=wanted.timeout)
            seen = await acted(self._service.events, "shell_run", wanted.command, runtime.held, work)
        except ActionError as error:
            raise SwerexError(f"{ERRORS}.SessionNotInitializedError", str(error)) from error
        output = seen.stdout.decode(errors="replace") + seen.stderr.decode(errors="replace")
        if seen.timed_out:
            raise SwerexError(
                f"{ERRORS}.CommandTimeoutError",
                f"timeout after {wanted.timeout} seconds while running command {wanted.command!r}",
                {"output": output},
            )
        code = None if wanted.check == "ignore" else seen.exit_code
        if wanted.check == "raise" and code != 0:
            message = f"Command {wanted.command!r} failed with exit code {code}. The output:\n{output!r}"
            if wanted.error_msg:
                message = f"{wanted.error_msg}: {message}"
            raise SwerexError(f"{ERRORS}.NonZeroExitCodeError", message)
        return {"output": output, "exit_code": code, "session_type": "bash"}

    async def close_session(self, request: Request, runtime: Runtime) -> dict[str, Any]:
        wanted = await _body(request, Session)
        runtime.shell(wanted.session)
        await runtime.shells.pop(wanted.session).close()
        return {"session_type": "bash"}

    async def execute(self, request: Request, runtime: Runtime) -> dict[str, Any]:
        wanted = await _body(request, Command)
        command: Any = wanted.command
        if isinstance(command, str) and not wanted.shell:
            command = [command]
        elif not isinstance(command, str) and wanted.shell:
            command = command[0]  # as subprocess.run does
        if wanted.merge_output_streams:
            words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
            command = ["/bin/sh", "-c", 'exec 2>&1; exec "$@"', "sh", *words]
        work = runtime.held.sandbox.exec(command, cwd=wanted.cwd, env=wanted.env, timeout=wanted.timeout)
        seen = await acted(self._service.events, "exec", wanted.command, runtime.held, work)
        out, err = seen.stdout.decode(errors="replace"), seen.stderr.decode(errors="replace")
        if seen.timed_out:
            raise SwerexError(
                f"{ERRORS}.CommandTimeoutError",
                f"Timeout ({wanted.timeout}s) exceeded while running command",
            )
        if wanted.check and seen.exit_code != 0:
            failed = f"Command {wanted.command!r} failed with exit code {seen.exit_code}"
            message = f"{failed}. Stdout:\n{out!r}\nStderr:\n{err!r}"
            if wanted.error_msg:
                message = f"{wanted.error_msg}: {message}"
            raise SwerexError(f"{ERRORS}.NonZeroExitCodeError", message)
        return {"stdout": out, "stderr": err, "exit_code": seen.exit_code}

    async def read_file(self, request: Request, runtime: Runtime) -> dict[str, Any]:
        wanted = await _body(request, FileRequest)
        work = runtime.held.sandbox.read(wanted.path, largest=LARGEST_REQUEST)
        data = await acted(self._service.events, "read", wanted.path, runtime.held, work)
        try:
            text = data.decode(wanted.encoding or "utf-8", wanted.errors or "strict")
        except (UnicodeDecodeError, LookupError) as error:
            raise SwerexError(f"{ERRORS}.SwerexException", str(error)) from error
        return {"content": text}

    async def write_file(self, request: Request, runtime: Runtime) -> dict[str, Any]:
        wanted = await _body(request, FileRequest)
        work = runtime.held.sandbox.write(wanted.path, wanted.content.encode())
        await acted(self._service.events, "write", wanted.path, runtime.held, work)
        return {}

    async def upload(self, request: Request, runtime: Runtime) -> dict[str, Any]:
        """Write a file, or the members of a zip archive."""
        async with request.form() as form:
            part, target = form["file"], str(form["target_path"])
            assert isinstance(part, UploadFile)
            data = await part.read()
            if str(form.get("unzip", "")).lower() != "true":
                await runtime.held.sandbox.write(target, data)
                return {}
        await self._unpack(runtime, data, target)
        return {}

    async def _unpack(self, runtime: Runtime, data: bytes, target: str) -> None:
        """Write the members of an archive, one after the other. Raises SwerexError, Exhausted."""
        sandbox, budget = runtime.held.sandbox, self._service.quotas.bytes
        with contextlib.closing(await anyio.to_thread.run_sync(_archive, data)) as archive:
            for member in archive.infolist():
                if member.filename.endswith("/"):  # a directory
                    continue
                path, mode = posixpath.join(target, member.filename), member.external_attr >> 16 & 0o777
                with budget.held(runtime.held.tenant, member.file_size):
                    content = await anyio.to_thread.run_sync(_content, archive, member)
                    await sandbox.write(path, content, mode=mode or 0o644)

    async def close(self, request: Request, tenant: str) -> dict[str, Any]:
        """End the sandbox of a name, which can be used again then."""
        name, sandboxes = request.path_params["name"], self._service.sandboxes
        async with self._lock(tenant, name), AsyncExitStack() as stack:
            runtime = self._runtimes.pop((tenant, name), None)
            held = self._adopted(tenant, name) if runtime is None else runtime.held
            stack.callback(sandboxes.forget_key, tenant, _key(name))
            if held is not None:
                stack.push_async_callback(sandboxes.release, held)
            if runtime is not None:
                for shell in runtime.shells.values():
                    stack.push_async_callback(shell.close)
        return {}


def _key(name: str) -> str:
    """The idempotency key of the sandbox with this name."""
    return f"swerex/{name}"


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Raises SwerexError for an archive that is not valid."""
    try:
        yield
    except _INVALID as error:
        raise SwerexError(f"{ERRORS}.SwerexException", f"the archive is not valid: {error}") from error


def _archive(data: bytes) -> zipfile.ZipFile:
    """A zip archive whose members can be unpacked. Raises SwerexError."""
    if data.count(_MEMBER) > MOST_MEMBERS:  # before each becomes an object
        raise SwerexError(f"{ERRORS}.SwerexException", f"the archive has more than {MOST_MEMBERS} members")
    with _reading():
        archive = zipfile.ZipFile(io.BytesIO(data))
    members = archive.infolist()
    if sum(member.file_size for member in members) > LARGEST_REQUEST:
        raise SwerexError(
            f"{ERRORS}.SwerexException", f"the archive has more than {LARGEST_REQUEST} bytes unpacked"
        )
    if any(member.compress_type not in _COMPRESSION or member.flag_bits & 1 for member in members):
        raise SwerexError(
            f"{ERRORS}.SwerexException", "the archive is encrypted, or has another compression than deflate"
        )
    return archive


def _content(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """What a member unpacks to, which is no more than it says: its size may be a lie. Raises SwerexError."""
    with _reading(), archive.open(member) as file:
        return file.read(member.file_size + 1)


async def _body(request: Request, kind: Any) -> Any:
    """Raises SwerexError."""
    try:
        return json_form.decode(await request.body() or b"{}", kind)
    except msgspec.MsgspecError as error:
        raise SwerexError(f"{ERRORS}.SwerexException", str(error)) from error


def _transferred(error: SwerexError) -> Response:
    """An error that the client raises again."""
    found = {"message": str(error), "class_path": error.path, "traceback": "", "extra_info": error.extra}
    return json_response({"swerexception": found}, 511)
