"""Commands: how they start, and the results of their end."""

from __future__ import annotations

from dutyfree.conformance import expect
from dutyfree.conformance.suite import Skipped, at_once, in_sandbox
from dutyfree.contract import Sandbox
from dutyfree.contract.errors import DispatchError, SubstrateError


@in_sandbox("commands")
async def exit_codes(sandbox: Sandbox) -> None:
    """The exit code of a command is returned unchanged."""
    for code in (0, 1, 2, 42, 126, 127, 255):
        seen = await sandbox.exec(f"exit {code}")
        expect.equal(seen.exit_code, code, f"exit code of 'exit {code}'")
        seen = await sandbox.exec(["sh", "-c", f"exit {code}"])
        expect.equal(seen.exit_code, code, f"exit code of ['sh', '-c', 'exit {code}']")
    seen = await sandbox.exec("true")
    expect.that(seen.ok and seen.signal is None and not seen.timed_out, f"not a plain success: {seen}")


@in_sandbox()
async def command_not_found(sandbox: Sandbox) -> None:
    """A program that does not exist gives 127 and a reason, not an error."""
    for command in (["no-such-program-at-all"], "no-such-program-at-all", ["./no/such/file"]):
        seen = await sandbox.exec(command)
        expect.equal(seen.exit_code, 127, f"exit code of {command!r}")
        expect.that(seen.stderr, f"{command!r} gave no reason on stderr")


@in_sandbox("commands")
async def not_executable(sandbox: Sandbox) -> None:
    """A file that is not executable gives 126 and a reason, not an error."""
    await sandbox.write("plain", b"#!/bin/sh\necho no\n", mode=0o644)
    await sandbox.write("directory/file", b"")
    for command in (["./plain"], "./plain", ["./directory"]):
        seen = await sandbox.exec(command)
        expect.equal(seen.exit_code, 126, f"exit code of {command!r}")
        expect.that(seen.stderr, f"{command!r} gave no reason on stderr")


@in_sandbox("commands")
async def signals(sandbox: Sandbox) -> None:
    """A command that signal n killed has exit code 128 + n and reports the signal."""
    for number in (9, 15, 6):
        seen = await sandbox.exec(f"kill -{number} $$; sleep 10")
        expect.equal((seen.exit_code, seen.signal), (128 + number, number), f"killed by signal {number}")
        expect.that(not seen.timed_out, "a killed command is not one that timed out")


@in_sandbox("commands")
async def signals_are_default(sandbox: Sandbox) -> None:
    """A command starts with no blocked signal, and with SIGPIPE not ignored."""
    seen = await sandbox.exec(["cat", "/proc/self/status"])
    lines = dict(line.split(":\t", 1) for line in seen.stdout.decode().splitlines() if ":\t" in line)
    expect.equal(int(lines["SigBlk"], 16), 0, "blocked signals")
    expect.equal(int(lines["SigIgn"], 16) >> 12 & 1, 0, "SIGPIPE is ignored")


@in_sandbox("commands")
async def argument_vectors(sandbox: Sandbox) -> None:
    """Arguments arrive unchanged: no shell expands, splits or drops them."""
    arguments = ["two words", "it's", '"quoted"', "new\nline", "ünï→𝄞", "", "$HOME", "*", "`id`", "\\n", "-n"]
    arguments += ["a;b", "a && b", "#no", "~", "{a,b}", "%s", "tab\t", " ", "'", '"', "x" * 100_000, ""]
    seen = await sandbox.exec(["printf", "%s\\0", *arguments])
    expect.equal(seen.stdout.decode().split("\0")[:-1], arguments, "arguments as printed")


@in_sandbox("commands")
async def shell_strings(sandbox: Sandbox) -> None:
    """A string runs in a POSIX shell: pipes, variables, conditions, here-documents."""
    script = (
        'x=3; printf "b\\na\\n" | sort | head -n 1 && echo "$((x + 2))" "$0" || echo no\ncat <<END\n$x\nEND'
    )
    seen = await sandbox.exec(script)
    expect.succeeded(seen, "a shell string")
    lines = seen.stdout.decode().splitlines()
    expect.equal((lines[0], lines[1].split()[0], lines[2]), ("a", "5", "3"), "output of a shell string")


@in_sandbox("commands")
async def environment(sandbox: Sandbox) -> None:
    """``env`` adds to the environment of one command, with any value, and of no other command."""
    values = {
        "PLAIN": "1",
        "UNICODE": "ünï→𝄞",
        "EQUALS": "a=b=c",
        "LINES": "one\ntwo\n",
        "EMPTY": "",
        "Q": "'\"",
    }
    for name, value in values.items():
        seen = await sandbox.exec(["printenv", name], env=values)
        expect.equal(seen.stdout.decode(), f"{value}\n", f"value of {name}")
    seen = await sandbox.exec('test -n "$PATH" && test -n "$PLAIN"', env=values)
    expect.succeeded(seen, "the environment without what was added")
    seen = await sandbox.exec(["printenv", "PLAIN"])
    expect.equal(seen.exit_code, 1, "exit code of printenv: the variable leaked to the next command")


@in_sandbox("commands")
async def environment_overrides(sandbox: Sandbox) -> None:
    """``env`` may replace an existing variable, also PATH, which finds the program."""
    await sandbox.write("bin/mine", b"#!/bin/sh\necho found\n", mode=0o755)
    path = f"{sandbox.workdir}/bin:/usr/bin:/bin"
    seen = await sandbox.exec("mine; printenv PATH", env={"PATH": path})
    expect.equal(seen.stdout.decode(), f"found\n{path}\n", "a command on the changed PATH")


@in_sandbox("commands")
async def working_directory(sandbox: Sandbox) -> None:
    """Commands start in the working directory, or in ``cwd``: relative to it, or absolute."""
    expect.that(sandbox.workdir.startswith("/"), f"workdir {sandbox.workdir!r} is not absolute")
    await sandbox.write("sub dir/file", b"here")
    for cwd in (None, ".", sandbox.workdir):
        seen = await sandbox.exec("cat 'sub dir/file'", cwd=cwd)
        expect.equal(seen.stdout, b"here", f"with cwd={cwd!r}")
    for cwd in ("sub dir", f"{sandbox.workdir}/sub dir", "./sub dir/."):
        seen = await sandbox.exec(["cat", "file"], cwd=cwd)
        expect.equal(seen.stdout, b"here", f"with cwd={cwd!r}")
    seen = await sandbox.exec("pwd", cwd="/")
    expect.equal(seen.stdout, b"/\n", "pwd with cwd='/'")


@in_sandbox("commands", deadline=120)
async def missing_working_directory(sandbox: Sandbox) -> None:
    """A ``cwd`` that does not exist, or is a file, is reported at once, and does no harm."""
    await sandbox.write("file", b"")
    for cwd in ("nowhere", "file"):
        try:
            seen = await sandbox.exec("echo ran", cwd=cwd)
        except (SubstrateError, OSError) as error:
            expect.that(str(error), "an error without a message")
        else:
            expect.that(seen.exit_code in (126, 127), f"cwd={cwd!r}: exit code {seen.exit_code}")
            expect.that(seen.stderr and not seen.stdout, f"cwd={cwd!r}: {seen}")
    expect.succeeded(await sandbox.exec("true"), "the next command")


@in_sandbox("commands")
async def user(sandbox: Sandbox) -> None:
    """``user`` runs the command as that user, by name or number."""
    if (await sandbox.exec("id -u")).stdout != b"0\n":
        raise Skipped("commands do not run as root")
    number = (await sandbox.exec("id -u nobody")).stdout.decode().strip()
    if not number:
        raise Skipped("there is no user nobody")
    for name in ("nobody", number):
        try:
            seen = await sandbox.exec("id -un", user=name)
        except DispatchError as refused:
            raise Skipped(f"runs no command as another user: {refused}") from None
        if not seen.started:
            raise Skipped(f"runs no command as another user: {seen.stderr.decode(errors='replace').strip()}")
        expect.equal(seen.stdout, b"nobody\n", f"id -un with user={name!r}")
    expect.equal((await sandbox.exec("id -u")).stdout, b"0\n", "id -u of the next command")


@in_sandbox("commands", deadline=120)
async def unknown_user(sandbox: Sandbox) -> None:
    """A user who does not exist is reported at once."""
    try:
        seen = await sandbox.exec("echo ran", user="no-such-user")
    except SubstrateError as error:
        expect.that("no-such-user" in str(error), f"the error does not name the user: {error}")
    else:
        expect.that(seen.exit_code in (126, 127) and not seen.stdout, f"unknown user: {seen}")
    expect.succeeded(await sandbox.exec("true"), "the next command")


@in_sandbox("commands")
async def concurrent_commands(sandbox: Sandbox) -> None:
    """64 commands at once each get their own output, errors, input and exit code."""

    async def one(number: int) -> None:
        seen = await sandbox.exec(f"cat; echo {number} >&2; exit {number}", stdin=str(number).encode() * 1000)
        expect.equal(seen.exit_code, number, f"exit code of command {number}")
        expect.equal(seen.stdout, str(number).encode() * 1000, f"output of command {number}")
        expect.equal(seen.stderr, f"{number}\n".encode(), f"errors of command {number}")

    await at_once(one, range(64))


@in_sandbox("commands", deadline=120)
async def many_short_commands(sandbox: Sandbox) -> None:
    """300 commands in a dozen tasks all end, also those that close their output before their end."""

    async def one(number: int) -> None:
        for turn in range(25):
            seen = await sandbox.exec(f"echo {turn}; exec >&- 2>&-; sleep 0.00{number % 7}; exit {number}")
            expect.equal((seen.exit_code, seen.stdout), (number, f"{turn}\n".encode()), "a short command")

    await at_once(one, range(12))
