"""An ssh session for each action, as people do it without dutyfree.

One more session is held for each sandbox: it makes the directory, and when its stdin ends it kills the
sandbox's processes and removes the directory. A command writes into files on the machine, and the session
sends them when it has ended: otherwise a process in the background would hold the session, and ssh could not
say how much was left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio

from dutyfree.contract import KILLED, Command, Cut, Limits, Observation, Span
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
    CleanupError,
    CollectError,
    CreateError,
    DispatchError,
    ExecError,
    SandboxClosed,
    Unavailable,
)
from dutyfree.substrates.local.command_files import TOOL_OUTPUT, FilesByCommands
from dutyfree.substrates.local.kill_script import MARK
from dutyfree.substrates.ssh.config import SshConfig
from dutyfree.substrates.ssh.connection import CHUNK, LOST, Connection, Connections, for_shell, quoted
from dutyfree.substrates.ssh.errors import last_line
from dutyfree.substrates.ssh.guest import NOISE_MAX, OURS

PREFIX = "exec-"
OWNER = "DUTYFREE_SANDBOX"
"""Its value ends with a full stop. Without it, the end of sandbox 1 would find the processes of 10."""
MADE = b"dutyfree-made"
KILL_SECONDS = 15.0
TEXT_MAX = 120 << 10
"""Bytes of a remote command: the machine's shell gets it as one argument, of up to 128 KiB."""

# $1 is the mark; $2, if given, is a directory: processes in it that have no mark are killed too. All are
# stopped first, because a shell whose child dies would continue with its next line.
# The kernel's own threads have no exe.
_KILL = r"""
hit() { [ "$2" = $$ ] || [ "$2" = 1 ] || { kill "$1" "$2" && found=1; }; }
each() {
  for file in $(grep -lF "$2" /proc/[0-9]*/environ); do pid=${file#/proc/}; hit "$1" "${pid%/*}"; done
  [ -n "$3" ] && for path in /proc/[0-9]*; do
    [ -e "$path/exe" ] || continue
    case $(readlink "$path/cwd") in
      "$3" | "$3"/*) grep -q DUTYFREE_EXEC= "$path/environ" || hit "$1" "${path#/proc/}" ;;
    esac
  done
}
killed() {
  n=0
  while [ $n -lt 50 ]; do
    found=
    each -STOP "$1" "$2"; each -STOP "$1" "$2"; each -KILL "$1" "$2"
    [ -n "$found" ] || return 0
    n=$((n + 1))
  done 2>/dev/null
}
"""

# A directory whose session was killed is removed by the next session. $1: the base, $2: the name.
_HOLD = (
    OURS
    + _KILL
    + r"""
umask 022
mkdir -p -m 711 "$1" && ours "$1" && cd "$1" || exit 70
for one in exec-*; do
  [ -f "$one/session" ] && [ ! -d "/proc/$(cat "$one/session")" ] && rm -rf "./$one"
done
mkdir -m 711 "$2" && mkdir "$2/work" "$2/tmp" && echo $$ >"$2/session" || exit 70
echo dutyfree-made
cat >/dev/null
killed "DUTYFREE_SANDBOX=$2." "$PWD/$2"
rm -rf "./$2" 2>/dev/null || { chmod -R u+rwX "./$2"; rm -rf "./$2"; }
"""
)

# Only the command has the mark of _KILL, and is in the directory: this shell lives on and sends the output.
_RUN = r"""
mark=$1 root=$2 cwd=$3 keep=$4; shift 4
out=$root/$mark.out err=$root/$mark.err
cd /
( cd -- "$cwd" ) 2>/dev/null || { printf '\n%s refused\n' "$mark"; exit 0; }
( cd -- "$cwd" && exec "$@" ) >"$out" 2>"$err"
code=$?
size() { set -- $(wc -c <"$1"); echo "$1"; }
o=$(size "$out") e=$(size "$err")
part() {
  if [ "$2" -gt "$keep" ]; then
    head -c $((keep / 2)) "$1"; tail -c $((keep - keep / 2)) "$1"
  else
    cat "$1"
  fi
}
printf '\n%s %s %s %s\n' "$mark" "$code" "$o" "$e"
part "$out" "$o"; part "$err" "$e"
rm -f "$out" "$err"
"""


class Request(NamedTuple):
    """A command, and what it is given."""

    words: tuple[str, ...]
    cwd: str
    variables: Mapping[str, str]
    stdin: bytes | None
    timeout: float | None
    keep: int
    """Bytes kept of each stream."""


class ExecSandbox(FilesByCommands):
    """A directory of the machine; every action is a session."""

    def __init__(
        self,
        name: str,
        connections: Connections,
        directory: str,
        config: SshConfig,
        environment: Mapping[str, str],
        limits: Limits,
    ) -> None:
        self.id = name
        self.spans: tuple[Span, ...] = ()
        self.variables: Mapping[str, str] = {}
        self._connections = connections
        self._root = f"{directory}/{name}"
        self._config = config
        self._environment = environment
        self._limits = limits
        self._closed = False
        self._running = 0

    @property
    def workdir(self) -> str:
        return f"{self._root}/work"

    @property
    def strays(self) -> str:
        """A directory: processes in it are the sandbox's own, also those that dropped their environment."""
        return self._root

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
            if user is not None:
                await self._check_user(user)
        except Unrunnable as error:
            return error.observation
        words = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
        variables = {**self.variables, **(env or {})}
        seen = await self._run(Request(words, cwd or ".", variables, stdin, timeout, self._limits.output))
        if seen is not None:
            return seen
        try:
            await self.list(cwd or ".")
        except ActionError as error:
            return not_started(str(error), NOT_FOUND if error.kind == "not_found" else NOT_RUNNABLE)
        return not_started(f"{cwd}: the directory cannot be entered", NOT_RUNNABLE)

    async def _check_user(self, user: str) -> None:
        """Raises Unrunnable if the user does not exist, and DispatchError if commands cannot run as it."""
        ids = [(await self.run_tool(("id", "-u", *name))).stdout for name in ((), ("--", user))]
        if not ids[1]:
            raise Unrunnable(f"cannot run the command: there is no user {user!r}")
        if ids[0] != ids[1]:
            raise DispatchError(f"all commands run as one user here, not as {user!r}")

    async def run_tool(self, argv: tuple[str, ...], stdin: bytes | None = None) -> Observation:
        seen = await self._run(Request(argv, "/", {}, stdin, None, TOOL_OUTPUT))
        if seen is None:
            raise ActionError("the shell of the sandbox says that / cannot be entered")
        return seen

    async def _run(self, request: Request) -> Observation | None:
        """None if the directory cannot be entered."""
        self._require_open()
        mark = secrets.token_hex(8)
        given = {**self._environment, **request.variables, OWNER: f"{self.id}.", MARK: mark}
        command = quoted(
            (
                *("/bin/sh", "-c", _RUN, "sh", mark, self._root),
                *(posixpath.join(self.workdir, request.cwd), str(min(request.keep, sys.maxsize >> 1))),
                *("env", "-i", *(f"{name}={value}" for name, value in given.items())),
                *_not_assigned(request.words),
            )
        )
        self._running += 1
        try:
            async with self._connections.slot() as connection:
                sent = for_shell(command, connection.machine.shell)
                if len(sent.encode(errors="surrogateescape")) > TEXT_MAX:
                    return not_started("the command is too long for ssh", NOT_RUNNABLE)
                execution = self._Execution(self, connection, mark, request.keep)
                return await execution.run(command, request.stdin, request.timeout)
        except Unavailable as error:
            raise DispatchError(error.message, remedy=error.remedy) from error
        finally:
            self._running -= 1

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxClosed(f"sandbox {self.id} is closed")

    class _Execution:
        """One action: its session, and the session that kills it."""

        def __init__(self, sandbox: ExecSandbox, connection: Connection, mark: str, keep: int) -> None:
            self._sandbox = sandbox
            self._connection = connection
            self._mark = mark
            self._keep = keep

        async def run(self, command: str, stdin: bytes | None, timeout: float | None) -> Observation | None:
            asked = time.perf_counter()
            sandbox, timed_out, is_lost = self._sandbox, False, False
            session = await sandbox._connections.piped(self._connection, command)
            spawned = time.perf_counter()
            received = asyncio.create_task(session.exchange(stdin or b"", 2 * self._keep + NOISE_MAX))
            try:
                await asyncio.wait([received], timeout=timeout)
                if not received.done():
                    timed_out = True
                    await self._kill(received)
                    is_lost = not received.done() and not await sandbox._connections.answers(self._connection)
                stdout = await received if received.done() else b""
                if stdout is None:
                    raise CollectError("the machine sent more output than was asked for, so it was dropped")
                code = await session.wait() if received.done() else 0
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._kill(received)
                raise
            finally:
                received.cancel()
                await session.end()
            done = time.perf_counter()
            spans = (Span("spawn", 0.0, spawned - asked), Span("run", spawned - asked, done - spawned))
            if is_lost or (timed_out and code == LOST and not self._connection.is_open):
                raise ExecError(f"the machine of {sandbox.id} does not answer, so the command was not killed")
            if timed_out and self._mark.encode() not in stdout:
                return Observation(
                    exit_code=KILLED + 9, signal=9, timed_out=True, seconds=done - asked, spans=spans
                )
            return self._observation(stdout, code, session.said, timed_out, spans)

        async def _kill(self, received: asyncio.Task[bytes | None]) -> None:
            """Kill the command and its descendants, and wait for the rest of the output."""
            alone = self._sandbox.strays if self._sandbox._running == 1 else ""
            script = f'{_KILL}\nkilled "$1" "$2"'
            command = quoted(("/bin/sh", "-c", script, "sh", f"{MARK}={self._mark}", alone))
            with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_SECONDS):
                while not received.done():  # the command may start a moment later
                    with contextlib.suppress(Unavailable):
                        await self._sandbox._connections.run(command)
                    await asyncio.wait([received], timeout=0.2)

        def _observation(
            self, stdout: bytes, code: int, said: str, timed_out: bool, spans: tuple[Span, ...]
        ) -> Observation | None:
            """Raises SandboxClosed, ExecError, CollectError."""
            _, found, rest = stdout.partition(b"\n" + self._mark.encode() + b" ")
            head, _, data = rest.partition(b"\n")
            if found and head == b"refused":
                return None
            sandbox = self._sandbox
            try:
                ended, out, err = (int(word) for word in head.split())
            except ValueError:
                if sandbox._closed:
                    raise SandboxClosed(f"sandbox {sandbox.id} was closed while the action ran") from None
                if found:
                    raise CollectError(f"the result of the command was lost: {last_line(said)}") from None
                raise ExecError(
                    f"ssh ended with code {code} while the action ran: {last_line(said)}"
                ) from None
            held = [min(size, self._keep) for size in (out, err)]
            if len(data) != sum(held):
                raise CollectError("the output of the command was not received whole")
            return Observation(
                exit_code=ended,
                signal=ended - KILLED if KILLED < ended <= KILLED + 64 else None,
                stdout=data[: held[0]],
                stderr=data[held[0] :],
                timed_out=timed_out,
                cut=Cut(out - held[0], err - held[1]),
                seconds=spans[-1].start + spans[-1].seconds,
                spans=spans,
            )


def _not_assigned(words: tuple[str, ...]) -> tuple[str, ...]:
    """``env`` would take a program with "=" in its name, or that begins with "-", as its own argument."""
    if "=" in words[0] or words[0].startswith("-"):
        return ("/bin/sh", "-c", 'exec "$0" "$@"', *words)
    return words


@asynccontextmanager
async def held(
    connections: Connections, connection: Connection, config: SshConfig, directory: str, name: str
) -> AsyncIterator[None]:
    """A directory on the machine, for as long as the context. Raises CreateError, CleanupError."""
    command = quoted(("/bin/sh", "-c", _HOLD, "sh", directory, name))
    session = await connections.piped(connection, command)
    stdin, stdout = session.process.stdin, session.process.stdout
    assert stdin is not None
    assert stdout is not None
    succeeded = False
    try:
        with anyio.move_on_after(config.connect_seconds):
            while (line := await stdout.readline()) and line.strip() != MADE:
                pass
            if not line:
                await session.wait()  # for all that it said
            succeeded = bool(line)
        if not succeeded:
            raise CreateError(f"cannot make {directory}/{name}: {last_line(session.said) or 'no answer'}")
        succeeded = False
        yield
        succeeded = True
    finally:
        with anyio.CancelScope(shield=True):
            stdin.close()
            code: int | None = None
            with anyio.move_on_after(config.end_seconds):
                while await stdout.read(CHUNK):  # asyncio sees no exit before the end of what came
                    pass
                code = await session.wait()
            await session.end()
        if code and succeeded:
            raise CleanupError(
                f"sandbox {name} was not removed: {last_line(session.said) or f'exit code {code}'}"
            )
        if code is None and succeeded:
            raise CleanupError(f"the machine did not remove sandbox {name} in {config.end_seconds:g} s")
