"""A container as a sandbox by the runtime's own exec: one process of this host for each action."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import posixpath
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NoReturn

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import KILLED, Command, Limits, Observation
from dutyfree.contract.arguments import (
    NOT_FOUND,
    NOT_RUNNABLE,
    Unrunnable,
    check_command,
    check_runnable,
    not_started,
)
from dutyfree.contract.errors import (
    ActionError,
    ActionKind,
    DispatchError,
    ExecError,
    SandboxClosed,
    SandboxGone,
)
from dutyfree.engine.layers.command_defaults import ENVIRONMENT, WORKDIR, CommandDefaults
from dutyfree.substrates.local import command as local
from dutyfree.substrates.local.command_files import TOOL_OUTPUT, FilesByCommands
from dutyfree.substrates.local.container_processes import kill_tree
from dutyfree.substrates.local.id_ranges import COUNT
from dutyfree.substrates.local.kill_script import KILL_SCRIPT, KILLER, MARK
from dutyfree.substrates.local.runtime_environment import runtime_environment
from dutyfree.substrates.oci import spec
from dutyfree.substrates.oci.container import Container

KILL_SECONDS = 15.0

MISSING = ("not found", "no such file")
"""Parts of the messages of runtimes if a program does not exist, in lower case."""

AT_FAULT = (
    *MISSING,
    "outside of container",  # runc, if the working directory is a link into /proc
    *(
        os.strerror(number).lower()
        for number in (
            *(errno.E2BIG, errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
            *(errno.ENOEXEC, errno.ENOTDIR, errno.EPERM),
        )
    ),
)
"""The same if the command is at fault: the program, the directory, or their length."""

CUT_OFF = ("sync socket", "failed to sync", "setns process", "init-p", "connection reset", "broken pipe")
"""The same if a process in the container killed the part of the runtime that had joined it."""

DECODED = """
for dutyfree_word do
    shift
    dutyfree_word=$(printf %bx "$dutyfree_word")
    set -- "$@" "${dutyfree_word%x}"
done
cd -- "$1" && shift && exec "$@"
"""
"""Runs a command whose words are escaped; the first is its directory. The x keeps newlines at the end."""


class ExecSandbox(FilesByCommands):
    """One running container, whose actions are the runtime's exec."""

    workdir = WORKDIR

    def __init__(
        self, container: Container, known: CommandDefaults, variables: Mapping[str, str], limits: Limits
    ) -> None:
        self.id = container.name
        self.spans = container.spans
        self._container = container
        self._known = known
        self._variables = variables
        self._limits = limits
        self._numbers = itertools.count(1)
        self._users: dict[str, str] = {}
        self._running = 0
        self._closed = False
        self._paused = False
        self._gone: SandboxGone | None = None
        self._kills = 0
        self._said = ""
        self._fault: ActionKind = "refused"

    def __repr__(self) -> str:
        return f"<ExecSandbox {self.id}{' closed' if self._closed else ''}>"

    def close(self) -> None:
        """From now on every method raises SandboxClosed."""
        self._closed = True

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> Observation:
        check_command(command, cwd=cwd, env=env, stdin=stdin, timeout=timeout, user=user)
        self._require_open()
        try:
            check_runnable(command, cwd=cwd, env=env, user=user)
            identity = await self._identity(user or self._known.user)
        except Unrunnable as error:
            return error.observation
        except SandboxGone:
            raise
        except ActionError as error:
            return not_started(str(error), NOT_RUNNABLE)
        argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
        place = posixpath.join(self._known.directory or WORKDIR, cwd or ".")
        seen = await self._run(
            argv, place, {**self._variables, **(env or {})}, stdin, timeout, identity, self._limits.output
        )
        if seen is None:
            oom = self._fault == "no_memory"
            return msgspec.structs.replace(await self._not_started(argv[0], cwd), oom=oom)
        return msgspec.structs.replace(seen, oom=True) if await self._oom_grew() else seen

    async def run_tool(self, argv: tuple[str, ...], stdin: bytes | None = None) -> Observation:
        seen = await self._run(argv, "/", ENVIRONMENT, stdin, None, "", TOOL_OUTPUT)
        if seen is None:
            said = self._said.strip()[-200:] or "a process in it killed the command at its start"
            raise ActionError(f"the container {self.id} cannot run {argv[0]}: {said}", kind=self._fault)
        return seen

    async def pause(self) -> None:
        self._require_open()
        self._paused = True
        try:
            await self._container.freeze()
        except BaseException:
            await self._go_on()
            raise

    async def resume(self) -> None:
        if self._closed:
            self._require_open()
        await self._go_on()

    async def _go_on(self) -> None:
        with anyio.CancelScope(shield=True):  # a container that is half resumed would run no command
            await self._container.thaw()
        self._paused = False

    # --- One command ------------------------------------------------------------------------------------

    async def _run(
        self,
        argv: tuple[str, ...],
        cwd: str,
        variables: Mapping[str, str],
        stdin: bytes | None,
        timeout: float | None,
        user: str,
        output: int,
    ) -> Observation | None:
        """None if the runtime says that it could not start the command."""
        self._require_open()
        number = next(self._numbers)
        mark = f"{MARK}={self.id}-{number}"
        files = [self._container.directory / f"{kind}-{number}" for kind in ("process", "exec", "log")]
        process, pid_file, log = files
        runtime = self._container.runtime
        env = [*(f"{name}={value}" for name, value in variables.items()), mark]
        argv, env, cwd = _as_unicode(argv, env, cwd)
        content = spec.process(runtime.inside(argv), env, cwd, user)
        self._running += 1
        try:
            try:
                await anyio.to_thread.run_sync(spec.write, process, content)
            except OSError as error:
                self._require_open()
                raise DispatchError(f"a command for {self.id} cannot be written: {error}") from error
            seen = await local.run(
                runtime.exec(self.id, process, pid_file=pid_file, log=log),
                cwd="/",
                env=runtime_environment({MARK: mark.partition("=")[2]}),
                kill=partial(self._kill, mark),
                stdin=stdin,
                timeout=timeout,
                output=output,
            )
            if seen.signal is not None and not seen.timed_out:
                await self._lost(mark, seen.signal)
            return await self._checked(seen, pid_file, log)
        finally:
            self._running -= 1
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_remove, *files)

    async def _lost(self, mark: str, number: int) -> NoReturn:
        """A signal ended the runtime's exec. It reports signals to the command as codes, so this was none."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._kill, mark)
        if self._closed:
            raise SandboxClosed(f"the sandbox {self.id} was closed while the command ran")
        kind = self._container.runtime.kind
        raise ExecError(f"signal {number} ended {kind} exec in {self.id}, so its command was killed, too")

    async def _checked(self, seen: Observation, pid_file: Path, log: Path) -> Observation | None:
        """The runtime's exit code is the command's only if the container still runs, and the command ran."""
        if seen.exit_code == 0 and not seen.timed_out:
            return seen
        if self._closed:
            raise SandboxClosed(f"the sandbox {self.id} was closed while the command ran")
        if not self._paused and not await self._container.is_running():
            reason = await self._container.explain()
            if isinstance(reason, SandboxGone):
                self._gone = reason
            raise reason
        if not seen.timed_out and not await anyio.to_thread.run_sync(pid_file.exists):
            self._said, self._fault = await self._refused(seen, log)
            return None
        # crun writes the pid before it replaces itself by the program.
        logs = self._container.runtime.logs_exec and not seen.timed_out
        if logs and (said := await anyio.to_thread.run_sync(_logged, log)):
            self._said, self._fault = said, "refused"
            return None
        code = seen.exit_code
        number = code - KILLED if KILLED < code <= KILLED + 64 else None
        return msgspec.structs.replace(seen, signal=number)

    async def _refused(self, seen: Observation, log: Path) -> tuple[str, ActionKind]:
        """What the runtime said when it ran no command, and what the agent did, who is at fault.

        Raises DispatchError if the agent is not at fault. The container runs: init has just answered.
        """
        said = await anyio.to_thread.run_sync(_logged, log) or seen.stderr.decode(errors="replace")
        if any(text in said.lower() for text in AT_FAULT):
            return said, "refused"
        if await self._oom_grew():
            return said, "no_memory"
        if await anyio.to_thread.run_sync(self._container.group.refused_processes):
            return said, "no_processes"
        cut_off = not said.strip() or any(text in said.lower() for text in CUT_OFF)
        if cut_off and not self._paused:
            return said, "killed"
        raise DispatchError(f"{self._container.runtime.kind} refused the command: {said.strip()[-500:]}")

    async def _not_started(self, program: str, cwd: str | None) -> Observation:
        """Say why a command could not be started, as a shell would."""
        if cwd is not None:
            try:
                await self.list(cwd)
            except ActionError as error:
                return not_started(str(error), NOT_FOUND if error.kind == "not_found" else NOT_RUNNABLE)
        missing = any(text in self._said.lower() for text in MISSING)
        return not_started(f"{program}: {self._said.strip()[-200:]}", NOT_FOUND if missing else NOT_RUNNABLE)

    def _kill(self, mark: str) -> None:
        """Kill the processes of a command. gVisor's are not processes of this host. Blocks."""
        alone = self._running == 1  # else a process without a mark may belong to another command
        if not self._container.runtime.is_gvisor:
            kill_tree(mark, strays=self._container.group.name if alone else "")
            return
        runtime = self._container.runtime
        script = ("/bin/sh", "-c", KILL_SCRIPT, "kill", mark, *(("-",) if alone else ()))
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [*runtime.base, "exec", "--env", f"{MARK}={KILLER}", self.id, *script],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=KILL_SECONDS,
                env=runtime_environment({}),
            )

    async def _identity(self, user: str) -> str:
        """The ids of a user, as ``UID:GID``: runtimes know no names. Raises Unrunnable."""
        if not user or user in ("root", "0"):
            return ""
        if user not in self._users:
            ids = [_told_id(await self.run_tool(("id", flag, "--", user))) for flag in ("-u", "-g")]
            if all(ids):
                self._users[user] = ":".join(ids)
            elif user.isdigit():
                self._users[user] = f"{user}:0"
            else:
                raise Unrunnable(f"cannot run the command: there is no user {user!r}")
        return self._users[user]

    async def _oom_grew(self) -> bool:
        """Whether the memory limit has killed a process since the last call."""
        if self._limits.memory is None:
            return False
        kills = await anyio.to_thread.run_sync(self._container.group.oom_kills) or 0
        grew, self._kills = kills > self._kills, max(kills, self._kills)
        return grew

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxClosed(f"the sandbox {self.id} is closed")
        if self._gone is not None:
            raise self._gone
        if self._paused:
            raise DispatchError(f"the sandbox {self.id} is paused", remedy="resume it first")


def _logged(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(errors="replace")
    return ""


def _told_id(seen: Observation) -> str:
    """The id that the sandbox's ``id`` printed; "" if it failed, or if no container has such an id."""
    said = seen.stdout.strip()
    is_id = seen.ok and len(said) <= len(str(COUNT)) and said.isdigit() and int(said) < COUNT
    return said.decode() if is_id else ""


def _as_unicode(argv: tuple[str, ...], env: list[str], cwd: str) -> tuple[tuple[str, ...], list[str], str]:
    """A command as JSON can have it. Texts may have any bytes, as surrogates: the container decodes these."""
    if not any(map(_has_bytes, (*argv, *env, cwd))):
        return argv, env, cwd
    odd = [variable for variable in env if _has_bytes(variable)]
    words = (cwd, *(("env", *odd) if odd else ()), *argv)
    return (
        ("/bin/sh", "-c", DECODED, "sh", *map(_escaped, words)),
        [variable for variable in env if variable not in odd],
        "/",
    )


def _has_bytes(text: str) -> bool:
    """Whether it has bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _escaped(text: str) -> str:
    """For the ``%b`` of printf."""
    data = text.encode(errors="surrogateescape")
    return "".join(chr(byte) if byte < 0x80 and byte != 0x5C else f"\\0{byte:03o}" for byte in data)


def _remove(*files: Path) -> None:
    for file in files:
        file.unlink(missing_ok=True)
