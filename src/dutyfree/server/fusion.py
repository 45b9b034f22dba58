"""``POST /run_code`` of SandboxFusion, which code rewards of trainers use: one program in a fresh sandbox."""

from __future__ import annotations

import binascii
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from dutyfree.contract import Limits, Observation
from dutyfree.contract.errors import ActionError, DutyfreeError, ExecError
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.server import json_form
from dutyfree.server.disconnects import while_connected
from dutyfree.server.handlers import DirectCall
from dutyfree.server.handlers.creation import admitted, demand_of
from dutyfree.server.json_form import json_response
from dutyfree.server.service import Service

Status = Literal["Success", "Failed", "SandboxError"]

MOST_FETCHED = 64 << 20
"""Bytes of all files that an answer has."""


class Language(NamedTuple):
    """How a program of a language is compiled, if it is, and run."""

    file: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()


LANGUAGES = {
    "python": Language("main.py", ("python3", "main.py")),
    "bash": Language("main.sh", ("bash", "main.sh")),
    "cpp": Language("main.cpp", ("./main",), ("g++", "-std=c++17", "-O2", "-o", "main", "main.cpp")),
    "nodejs": Language("main.js", ("node", "main.js")),
    "javascript": Language("main.js", ("node", "main.js")),
}


class RunCode(msgspec.Struct, frozen=True):
    """A request, as SandboxFusion's clients send it."""

    code: str
    language: str
    stdin: str | None = None
    compile_timeout: float = 10.0
    run_timeout: float = 10.0
    memory_limit_MB: int = -1  # noqa: N815 (their name)
    files: dict[str, str | None] = {}
    """Contents in base64, by path."""
    fetch_files: tuple[str, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """How compiling or running ended."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeAnswer(msgspec.Struct, frozen=True):
    status: Status
    message: str = ""
    compile_result: StepResult | None = None
    run_result: StepResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


async def run_code(service: Service, tenant: str, request: Request) -> Response:
    """Always one of their answers: an error of ours is a SandboxError, which is not the program's fault."""
    try:
        wanted = json_form.decode(await request.body(), RunCode)
    except msgspec.MsgspecError as error:
        return json_response({"detail": str(error)}, 422)
    language = LANGUAGES.get(wanted.language)
    if language is None:
        known = ", ".join(LANGUAGES)
        return json_response(
            RunCodeAnswer("SandboxError", f"no language {wanted.language!r}; there are {known}")
        )
    running = service.events.begin("run_code", wanted.language, tenant, None)
    try:
        answer = await while_connected(request, _run(DirectCall(service, tenant), wanted, language))
    except BaseException as error:
        service.events.fail(running, error)
        if isinstance(error, DutyfreeError | binascii.Error):
            return json_response(RunCodeAnswer("SandboxError", str(error)))
        raise
    service.events.end(running, answer, "ok" if answer.status == "Success" else "failed")
    return json_response(answer)


async def _run(context: DirectCall, wanted: RunCode, language: Language) -> RunCodeAnswer:
    memory = wanted.memory_limit_MB << 20 if wanted.memory_limit_MB > 0 else None
    limits = Limits(memory=memory)

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Sequence[NativeSandbox]]:
        async with context.service.native.sandbox(limits=limits) as sandbox:
            yield (sandbox,)

    async with admitted(context, demand_of(context.service, limits, 1), fresh)() as (sandbox,):
        for path, content in wanted.files.items():
            await sandbox.write(path, binascii.a2b_base64(content or ""))
        await sandbox.write(language.file, wanted.code.encode())
        compiled = None
        if language.compile:
            compiled = await _step(sandbox, language.compile, None, wanted.compile_timeout)
            if compiled.return_code != 0:
                return RunCodeAnswer("Failed", compile_result=compiled)
        stdin = None if wanted.stdin is None else wanted.stdin.encode()
        ran = await _step(sandbox, language.run, stdin, wanted.run_timeout)
        status: Status = "Success" if ran.return_code == 0 else "Failed"
        return RunCodeAnswer(
            status, compile_result=compiled, run_result=ran, files=await _fetched(sandbox, wanted.fetch_files)
        )


async def _step(
    sandbox: NativeSandbox, command: tuple[str, ...], stdin: bytes | None, timeout: float
) -> StepResult:
    start = perf_counter()
    try:
        seen: Observation = await sandbox.exec(command, stdin=stdin, timeout=timeout)
    except ActionError as error:  # verdict "task": the program has ended its sandbox
        return StepResult("Error", perf_counter() - start, None, None, str(error))
    if not seen.started:  # the compiler or the interpreter: this must not look like a wrong program
        raise ExecError(f"the image has no {command[0]}: {seen.stderr.decode(errors='replace').strip()}")
    out, err = seen.stdout.decode(errors="replace"), seen.stderr.decode(errors="replace")
    if seen.timed_out:
        return StepResult("TimeLimitExceeded", perf_counter() - start, None, out, err)
    return StepResult("Finished", seen.command_seconds, seen.exit_code, out, err)


async def _fetched(sandbox: NativeSandbox, paths: tuple[str, ...]) -> dict[str, str]:
    """The files that the program wrote, in base64. Raises FileError if they are too large together."""
    found: dict[str, str] = {}
    left = MOST_FETCHED
    for path in dict.fromkeys(paths):
        try:
            data = await sandbox.read(path, largest=left)
        except ActionError as error:
            if error.kind == "too_large":
                raise
            continue  # the program did not write it
        left -= len(data)
        found[path] = binascii.b2a_base64(data, newline=False).decode()
    return found
