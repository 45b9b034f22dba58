"""The substrate ``ssh`` with a real sshd on loopback: both ways of actions, failures, and killed owners."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import dutyfree
from dutyfree import Limits, substrates
from dutyfree.conformance import CHECKS, Check
from dutyfree.contract.errors import (
    CleanupError,
    CollectError,
    CreateError,
    DutyfreeError,
    ExecError,
    SandboxGone,
    SubstrateError,
    Unavailable,
    verdict,
)
from dutyfree.engine.sandbox.init_sandbox import InitSandbox
from dutyfree.substrates.ssh import Ssh, SshConfig
from dutyfree.substrates.ssh.connection import Connections, environment, for_shell, quoted
from dutyfree.substrates.ssh.errors import unavailable
from dutyfree.substrates.ssh.guest import PREAMBLE, Preamble
from tests.awaiting import appeared, enter, together, until
from tests.processes import eventually, speaking_python
from tests.ssh_server import SshServer, ssh_server

NAMES = """
    signals_are_default user unread_stdin output_limit timeout_kills_the_tree timeout_kills_the_disguised
    many_cancellations leaving_ends_what_runs tree_round_trip round_trips special_files recipe_path
    recipe_commands cancelled_creation sandboxes_at_once streaming batch managed_processes
"""
CORE = {*NAMES.split()}
"""What depends on the stream or on the machine. The other checks are slow tests in ``test_conformance``."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """Its users have no namespaces, so init is one process of the machine among others."""
    with ssh_server(tmp_path_factory.mktemp("sshd"), namespaces=False) as started:
        yield started


@pytest.fixture(scope="module")
async def ssh(server: SshServer) -> AsyncIterator[Ssh]:
    async with dutyfree.open("ssh", **server.options) as opened:
        yield opened


def left(server: SshServer) -> list[str]:
    """The directories of sandboxes."""
    return [path.name for path in server.base.iterdir() if path.is_dir()]


def sleepers(mark: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True, text=True, check=False)
    return found.stdout.split()


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in CORE], ids=str)
async def test_conformance(ssh: Ssh, check: Check) -> None:
    await check(ssh)


# --- Processes --------------------------------------------------------------------------------------------


@pytest.mark.root("a user without rights has no pid namespace")
async def test_a_pid_namespace_where_the_machine_allows_one(tmp_path: Path, ssh: Ssh) -> None:
    with ssh_server(tmp_path) as server:
        async with dutyfree.open("ssh", **server.options) as opened:
            assert (await opened.facts())["processes"] == "own pid namespace"
            async with opened.sandbox() as sandbox:
                seen = await sandbox.exec("sleep 1000 & sleep 1000", timeout=0.5)
                assert seen.timed_out
                assert (await sandbox.exec("ls -d /proc/[0-9]* | wc -l")).stdout.strip() < b"9"
    assert (await ssh.facts())["processes"] == "those of the machine"


async def test_only_processes_of_the_own_sandbox_are_killed(ssh: Ssh) -> None:
    """Two inits without namespaces use the same marks, and see each other's processes."""
    async with ssh.sandbox() as one, ssh.sandbox() as other:
        assert isinstance(one, InitSandbox)
        assert isinstance(other, InitSandbox)
        kept = await one.start("sleep 1000")
        assert (await other.exec("sleep 1000", timeout=0.3)).timed_out
        await other.pause()
        await other.resume()
        await other.end_processes()
        assert (await one.exec("echo fine")).stdout == b"fine\n"
        assert kept.running


async def test_the_end_of_sandbox_1_is_not_that_of_10(server: SshServer) -> None:
    async with dutyfree.open("ssh", **server.options, actions="exec") as opened:
        first = opened.sandbox()
        await first.__aenter__()
        opened._numbers = itertools.count(10)
        async with opened.sandbox() as tenth, anyio.create_task_group() as tasks:

            async def work() -> None:
                seen = await tenth.exec("touch begun; while [ ! -e end ]; do sleep 0.05; done")
                assert seen.ok, seen

            tasks.start_soon(work)
            await appeared(tenth, "begun")
            await first.__aexit__(None, None, None)
            await tenth.write("end", b"")


@pytest.mark.parametrize("shell", ["sh", "bash", "busybox", "zsh", "mksh", "fish", "tcsh"])
def test_every_login_shell_passes_a_command_on(shell: str) -> None:
    """The sshd runs: SHELL -c COMMAND."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell}; to enable it: apt-get install {shell}")
    script = 'printf "%s|" "$@"; cat\n# it\'s a \\ comment!'
    words = ("a b", "it's", '"', "\\", "\\\\", "!!", "$HOME", "`id`", "*", "two\nlines", "%s", "é")
    command = for_shell(quoted(("/bin/sh", "-c", script, "sh", *words)), found)
    argv = [found, *(["sh"] if shell == "busybox" else []), "-c", command]
    done = subprocess.run(argv, input=b"stdin", capture_output=True, check=False)
    assert done.stdout.decode() == "|".join((*words, "stdin")), done


async def test_what_escapes_is_killed_at_the_end(ssh: Ssh, server: SshServer) -> None:
    async with ssh.sandbox() as sandbox:
        await sandbox.exec("setsid sh -c 'cd /; exec env -i /bin/sleep 98761' </dev/null >/dev/null 2>&1 &")
        await until(lambda: sleepers("98761"))
    assert not sleepers("98761")
    assert sandbox.id not in left(server)


async def test_a_directory_that_cannot_be_written_is_removed(ssh: Ssh, server: SshServer) -> None:
    async with ssh.sandbox() as sandbox:
        assert (await sandbox.exec("mkdir -p a/b && touch a/b/c && chmod 0 a/b a")).ok
    assert sandbox.id not in left(server)


@pytest.mark.slow
async def test_a_stopped_init_does_not_stay(ssh: Ssh, server: SshServer) -> None:
    """A command can stop it, because both have the same user. Its supervisor ends it."""
    async with unless_unknown(ssh.sandbox()) as sandbox:
        with pytest.raises(SandboxGone):
            await sandbox.exec("sleep 98764 & kill -STOP $PPID", timeout=1)
    await until(lambda: sandbox.id not in left(server) and not sleepers("98764"))


@pytest.mark.root("only root can make the directory of another user")
async def test_a_program_of_another_user_is_not_run(server: SshServer) -> None:
    """The directory vanished after the opening, as those in /tmp may, and another user made it anew."""
    async with dutyfree.open("ssh", **server.options) as opened:
        await enter(opened.sandbox())
        (program,) = server.base.glob("init-*")
        moved, ran = server.root / "moved", server.root / "ran"
        for owner in (server.base, program):
            server.base.rename(moved)
            server.base.mkdir()
            program.write_text(f"#!/bin/sh\ntouch {ran}\n")
            program.chmod(0o755)
            os.chown(owner, 65534, 65534)
            with pytest.raises(CreateError, match="open the substrate again"):
                await enter(opened.sandbox())
            shutil.rmtree(server.base)
            moved.rename(server.base)
        assert not ran.exists()
        await enter(opened.sandbox())


# --- Connections ------------------------------------------------------------------------------------------


async def test_more_sandboxes_than_a_connection_carries(server: SshServer) -> None:
    async with dutyfree.open("ssh", **server.options, sessions=3) as opened:

        async def use() -> None:
            async with opened.sandbox() as sandbox:
                await sandbox.exec("true")
                await anyio.sleep(0.2)

        await together(*[use] * 5)
        assert len(opened._connections._open) > 1
    assert not left(server)


async def test_noise_of_the_login_shell(tmp_path: Path) -> None:
    noise = 'ForceCommand echo "welcome to this machine"; eval "$SSH_ORIGINAL_COMMAND"'
    with ssh_server(tmp_path, noise) as server:
        async with dutyfree.open("ssh", **server.options) as opened, opened.sandbox() as sandbox:
            assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


@pytest.mark.parametrize("size", [1, 4, 100])
def test_the_stream_begins_after_the_preamble(size: int) -> None:
    stream, found = b"hello\0dutyfree?" + PREAMBLE + b"frames" + PREAMBLE, Preamble()
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert b"".join(found.decode(piece) for piece in pieces) == b"frames" + PREAMBLE


async def test_a_broken_copy_of_init_is_replaced(server: SshServer) -> None:
    async with dutyfree.open("ssh", **server.options):
        pass
    (copy,) = server.base.glob("init-*")
    whole = copy.read_bytes()
    copy.unlink()
    copy.write_bytes(whole[:1000])
    async with dutyfree.open("ssh", **server.options) as opened, opened.sandbox() as sandbox:
        assert (await sandbox.exec("true")).ok
    assert copy.read_bytes() == whole


@pytest.mark.parametrize("actions", ["init", "exec"])
async def test_a_lost_connection(tmp_path: Path, actions: str) -> None:
    """It is an error of the infrastructure; the machine cleans up, and the next sandbox works."""
    failures: list[DutyfreeError] = []

    async def run(sandbox: dutyfree.Sandbox) -> None:
        try:
            await sandbox.exec("touch begun; sleep 98762")
        except DutyfreeError as error:
            failures.append(error)

    async def lose(opened: Ssh, server: SshServer) -> None:
        async with opened.sandbox() as sandbox, anyio.create_task_group() as tasks:
            tasks.start_soon(run, sandbox)
            await appeared(sandbox, "begun")
            for pid in server.sessions():
                os.kill(pid, signal.SIGKILL)

    with ssh_server(tmp_path) as server:
        async with dutyfree.open("ssh", **server.options, actions=actions) as opened:
            with pytest.raises(SubstrateError):
                await lose(opened, server)
            assert isinstance(failures[0], ExecError), failures
            assert verdict(failures[0]) == "infrastructure"
            await until(lambda: not left(server) and not sleepers("98762"))
            async with opened.sandbox() as sandbox:
                assert (await sandbox.exec("echo again")).stdout == b"again\n"


@pytest.mark.parametrize("actions", ["init", pytest.param("exec", marks=pytest.mark.slow)])
async def test_a_machine_that_stops_answering(tmp_path: Path, actions: str) -> None:
    """A timeout meanwhile is an error of the infrastructure: the command was not ended."""
    with ssh_server(tmp_path) as server:
        async with (
            dutyfree.open("ssh", **server.options, actions=actions) as opened,
            unless_unknown(opened.sandbox()) as sandbox,
        ):
            stopped = server.sessions()
            try:
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                with pytest.raises(ExecError):
                    await sandbox.exec("true", timeout=0.5)
            finally:
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def unless_unknown(manager: contextlib.AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
    """A sandbox of which nobody may know in the end whether it was removed."""
    with contextlib.suppress(CleanupError):
        async with manager as sandbox:
            yield sandbox


async def test_those_who_wait_for_one_connection_share_its_failure(tmp_path: Path) -> None:
    """If each tried in its turn, the last one would wait for the time of all connections."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        config = SshConfig(host="127.0.0.1", port=silent.getsockname()[1], config="none", connect_seconds=1.0)
        connections = Connections(config, tmp_path, environment("DUTYFREE_TEST=1"))

        async def connect() -> None:
            with pytest.raises(Unavailable):
                await connections.machine()

        await together(*[connect] * 5)
        assert tried(silent) == 1
        await connect()  # who comes later tries anew
        assert tried(silent) == 1


def tried(server: socket.socket) -> int:
    """How many connections a server has not accepted yet. It accepts them."""
    found = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            found += 1
    return found


async def test_a_machine_that_went_away(tmp_path: Path) -> None:
    with ssh_server(tmp_path) as server:
        async with dutyfree.open("ssh", **server.options) as opened:
            for pid in server.sessions():
                os.kill(pid, signal.SIGKILL)
            server.process.terminate()
            await anyio.to_thread.run_sync(server.process.wait)
            for _ in range(2):  # the first one may still take the old connection
                with pytest.raises(CreateError):
                    await enter(opened.sandbox())


def test_the_agent_is_not_forwarded(server: SshServer, tmp_path: Path) -> None:
    """Also if the user's settings forward it: a command could log in elsewhere with its keys."""
    config = tmp_path / "config"
    config.write_text((server.root / "config").read_text() + "  ForwardAgent yes\n")
    connections = Connections(SshConfig(host="dutyfree-test", config=str(config)), tmp_path, {})
    program, *words = connections._argv(tmp_path / "socket", "yes", "true")
    told = subprocess.run([program, "-G", *words], capture_output=True, text=True, check=True)
    assert "forwardagent no" in told.stdout.splitlines()


# --- Programs that were replaced --------------------------------------------------------------------------


def flooding(directory: Path, program: str) -> str:
    """A setting of sshd, with which a program of the machine writes without end if it has an argument."""
    found, fake = shutil.which(program), directory / "bin" / program
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\n[ $# = 0 ] && exec {found}\nexec yes\n")
    fake.chmod(0o755)
    return f'ForceCommand PATH={fake.parent}:$PATH; eval "$SSH_ORIGINAL_COMMAND"'


async def test_output_without_end(tmp_path: Path) -> None:
    """Root of the machine can make the program that sends us the output send more than we asked for."""
    with ssh_server(tmp_path, flooding(tmp_path, "cat")) as server:
        async with (
            dutyfree.open("ssh", **server.options, actions="exec") as opened,
            opened.sandbox(limits=Limits(output="64K")) as sandbox,
        ):
            with anyio.fail_after(60), pytest.raises(CollectError, match="more output than was asked for"):
                await sandbox.exec("true")


async def test_an_answer_without_end(tmp_path: Path) -> None:
    with (
        ssh_server(tmp_path, flooding(tmp_path, "sha256sum")) as server,
        pytest.raises(Unavailable, match="more than 1048576 bytes"),
    ):
        await enter(dutyfree.open("ssh", **server.options))


# --- Machines that cannot be used -------------------------------------------------------------------------


FOREIGN = pytest.mark.root("only root can give a directory to another user")


@pytest.fixture(params=["a link", "writable for others", pytest.param("foreign", marks=FOREIGN)])
def unsafe(request: pytest.FixtureRequest, server: SshServer, tmp_path: Path) -> dict[str, Any]:
    """The options, with a directory in which another user could replace what we run."""
    path = tmp_path / "unsafe"
    if request.param == "a link":
        path.symlink_to(server.base)
    else:
        path.mkdir()
        path.chmod(0o777 if request.param == "writable for others" else 0o755)
    if request.param == "foreign":
        os.chown(path, 65534, 65534)
    return {**server.options, "directory": str(path)}


async def test_a_directory_that_others_could_change(unsafe: dict[str, Any]) -> None:
    said = "is a link, belongs to another user, or others can write to it"
    with pytest.raises(Unavailable, match=said):
        await enter(dutyfree.open("ssh", **unsafe))
    async with dutyfree.open("ssh", **unsafe, actions="exec") as opened:
        with pytest.raises(CreateError, match=said):
            await enter(opened.sandbox())


@pytest.fixture
def with_another_key(server: SshServer, tmp_path: Path) -> dict[str, Any]:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    config = (server.root / "config").read_text().replace(f"{server.root}/user_key", f"{tmp_path}/key")
    (tmp_path / "config").write_text(config)
    return {**server.options, "config": str(tmp_path / "config")}


async def test_a_wrong_key(with_another_key: dict[str, Any]) -> None:
    with pytest.raises(Unavailable, match=r"the authentication failed.*ssh-add"):
        await enter(dutyfree.open("ssh", **with_another_key))
    found = await substrates.probe("ssh", **with_another_key)
    assert not found.available
    assert "ssh-add" in found.remedy


async def test_an_unknown_host_key(server: SshServer) -> None:
    unknown = {**server.options, "options": ["UserKnownHostsFile=/dev/null", "StrictHostKeyChecking=yes"]}
    with pytest.raises(Unavailable, match=r"the host key is not known.*known_hosts"):
        await enter(dutyfree.open("ssh", **unknown))


async def test_the_remedy_is_a_command_that_reaches_the_same_machine(server: SshServer) -> None:
    strict = ["UserKnownHostsFile=/dev/null", "StrictHostKeyChecking=yes"]
    with pytest.raises(Unavailable) as refused:
        await enter(dutyfree.open("ssh", **{**server.options, "options": strict, "identity": "/a key"}))
    assert "-o StrictHostKeyChecking=yes -F" in refused.value.remedy
    assert "-i '/a key'" in refused.value.remedy


def test_the_port_is_part_of_the_remedy() -> None:
    config = SshConfig(host="me@there", port=2222)
    assert "`ssh -p 2222 me@there true`" in unavailable(config, "Host key verification failed.").remedy
    said = "REMOTE HOST IDENTIFICATION HAS CHANGED"
    assert unavailable(config, said).remedy.endswith("ssh-keygen -R '[there]:2222'")


async def test_an_identity_that_does_not_exist(with_another_key: dict[str, Any]) -> None:
    with pytest.raises(Unavailable, match=r"the file /nonexistent/key does not exist.*identity="):
        await enter(dutyfree.open("ssh", **{**with_another_key, "identity": "/nonexistent/key"}))


async def test_an_option_that_ssh_does_not_know(server: SshServer) -> None:
    with pytest.raises(Unavailable, match=r"Bad configuration option: nonsense.*check options="):
        await enter(dutyfree.open("ssh", **{**server.options, "options": ["Nonsense=1"]}))


async def test_nobody_listens() -> None:
    with pytest.raises(Unavailable, match="the machine does not answer"):
        await enter(dutyfree.open("ssh", host="127.0.0.1", port=1, config="/dev/null"))


async def test_no_machine_is_named() -> None:
    found = await substrates.probe("ssh")
    assert (found.available, found.remedy) == (
        False,
        "name it with the option host=, as for the program ssh",
    )


async def test_no_ssh_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"no ssh program.*openssh-client"):
        await enter(dutyfree.open("ssh", host="anywhere"))


async def test_a_directory_that_cannot_be_made(server: SshServer) -> None:
    with pytest.raises(Unavailable, match=r"cannot be copied to /proc/nowhere.*directory="):
        await enter(dutyfree.open("ssh", **{**server.options, "directory": "/proc/nowhere"}))


# --- Killed -----------------------------------------------------------------------------------------------

OWNER = """
    import json, sys, anyio, dutyfree

    async def main():
        async with dutyfree.open("ssh", **json.loads(sys.argv[1])) as opened:
            async with opened.sandbox() as sandbox:
                await sandbox.exec("setsid sleep 98763 </dev/null >/dev/null 2>&1 &")
                print(sandbox.id, opened._directory, flush=True)
                await sandbox.exec("sleep 98763")

    anyio.run(main)
"""


@pytest.mark.parametrize("actions", ["init", "exec"])
def test_a_killed_owner_leaves_nothing(tmp_path: Path, actions: str) -> None:
    with ssh_server(tmp_path, namespaces=False) as server:
        options = json.dumps({**server.options, "actions": actions})
        with speaking_python(OWNER, options) as (process, line):
            name, directory = line.split()
            assert eventually(lambda: len(sleepers("98763")) > 1)
            assert name in left(server)
            process.kill()
        assert eventually(lambda: not left(server) and not sleepers("98763")), left(server)
        assert eventually(lambda: not Path(directory).exists() and not server.sessions())


async def killed_supervisor(ssh: Ssh) -> None:
    async with ssh.sandbox() as sandbox:
        # The supervisor has the lower number; the other one is init.
        found = await anyio.run_process(["pgrep", "-f", f"remote .* {sandbox.id}$"])
        os.kill(min(int(pid) for pid in found.stdout.split()), signal.SIGKILL)
        await sandbox.exec("sleep 1000")


async def test_what_a_killed_supervisor_left_is_removed(ssh: Ssh, server: SshServer) -> None:
    """No one holds the lock of its directory: the next sandbox removes it."""
    with pytest.raises(SubstrateError):
        await killed_supervisor(ssh)
    async with ssh.sandbox() as sandbox:
        assert left(server) == [sandbox.id]
