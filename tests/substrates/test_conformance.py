"""Every substrate of ours keeps every promise, or names what it does not offer; the suite survives any."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

import dutyfree
from dutyfree.conformance import CHECKS, Check, judge
from dutyfree.conformance.__main__ import option
from dutyfree.contract import Substrate
from tests.cloud_server import CREDENTIALS, cloud_server
from tests.oci_runtime import need
from tests.processes import speaking
from tests.serving import certificates, serving
from tests.ssh_server import ssh_server

ROOT = pytest.mark.root("neither reduced isolation nor storage on disk without root")

SUBSTRATES = [
    "scripted",
    "bare",
    pytest.param("native", marks=pytest.mark.native),
    pytest.param("native isolation=none", marks=[pytest.mark.native, ROOT], id="native-none"),
    pytest.param(
        "native storage=disk",
        marks=[pytest.mark.native, pytest.mark.loop, pytest.mark.slow, ROOT],
        id="native-disk",
    ),
    pytest.param("native-cold", marks=pytest.mark.native),
    pytest.param("native-warm", marks=pytest.mark.native),
    pytest.param("hosted", marks=pytest.mark.native),
    pytest.param("hosted unix", marks=[pytest.mark.native, pytest.mark.slow], id="hosted-unix"),
    pytest.param("hosted tls", marks=[pytest.mark.native, pytest.mark.slow], id="hosted-tls"),
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("docker actions=init", marks=[pytest.mark.docker, pytest.mark.slow], id="docker-init"),
    *(
        pytest.param(
            f"oci runtime={runtime} actions={actions}",
            marks=[pytest.mark.native, pytest.mark.slow, ROOT],
            id=f"oci-{runtime}-{actions}",
        )
        for runtime in ("crun", "runc", "runsc")
        for actions in ("init", "exec")
    ),
    pytest.param("vm restore=true", marks=[pytest.mark.vm, pytest.mark.emulated], id="vm"),
    pytest.param("vm restore=true actions=exec", marks=[pytest.mark.vm, pytest.mark.emulated], id="vm-exec"),
    pytest.param("kubernetes", marks=[pytest.mark.kubernetes, pytest.mark.slow]),
    pytest.param(
        "kubernetes actions=exec", marks=[pytest.mark.kubernetes, pytest.mark.slow], id="kubernetes-exec"
    ),
    pytest.param("ssh", marks=pytest.mark.slow),
    pytest.param("ssh actions=exec", marks=pytest.mark.slow, id="ssh-exec"),
    pytest.param("cloud", marks=pytest.mark.slow),
    pytest.param("cloud actions=exec", marks=pytest.mark.slow, id="cloud-exec"),
]


_WHOLE = "a sandbox of gVisor ends as a whole when it exceeds a limit"
GVISOR = {
    "signals_are_default": "gVisor does not list the signals of a process in /proc",
    "memory": _WHOLE,
    "out_of_memory": _WHOLE,
    "out_of_memory_in_the_background": _WHOLE,
    "pids": _WHOLE,
    "no_processes_left": _WHOLE,
    "cpus": "gVisor estimates the CPU time of processes",  # test_oci.py asks the control group
}
EXCEPTIONS = {
    "oci-runsc": GVISOR,
    "oci-runsc-exec": {
        "missing_working_directory": "gVisor runs a command whose directory is a file",
        "places_where_no_command_starts": "gVisor runs a command whose directory is a file",
    },
    "oci-runc-exec": {"no_processes_left": "an exec of runc takes processes from the limit of the container"},
}
"""Promises that a runtime does not keep, by the beginning of the name above."""


@pytest.fixture(scope="module", params=SUBSTRATES)
async def substrate(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Substrate]:
    name, *words = request.param.split()
    with contextlib.ExitStack() as stack:
        if name == "hosted":
            state = tmp_path_factory.mktemp("server")
            options = stack.enter_context(reached_by(words[0] if words else "tcp", state))
        else:
            options = dict(map(option, words))
        if name == "oci":
            need(options["runtime"])
        if name == "ssh":
            server = stack.enter_context(ssh_server(tmp_path_factory.mktemp("sshd")))
            options = {**server.options, **options}
        if name == "cloud":
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for variable, value in CREDENTIALS.items():
                patch.setenv(variable, value)
            there = stack.enter_context(cloud_server(tmp_path_factory.mktemp("cloud")))
            options = {**there.options, **options}
        async with dutyfree.open(name, **options) as opened:
            await opened.prepare()  # an image may have to be made, which is no part of any check
            yield opened


@contextlib.contextmanager
def reached_by(transport: str, state: Path) -> Iterator[dict[str, str]]:
    """The options of ``hosted`` for a server that is reached over TCP, TLS or a Unix socket."""
    if transport == "tls":
        root, chain, key = certificates(state)
        with serving(state, "--certificate", str(chain), "--key", str(key)) as url:
            yield {"url": url, "certificates": str(root)}
        return
    listen = f"unix:{state}/socket" if transport == "unix" else "127.0.0.1:0"
    with serving(state, listen=listen) as url:
        yield {"url": url}


@pytest.mark.parametrize("check", CHECKS, ids=str)
async def test_conformance(substrate: Substrate, check: Check, request: pytest.FixtureRequest) -> None:
    for substrate_name, reasons in EXCEPTIONS.items():
        if f"[{substrate_name}" in request.node.name and (reason := reasons.get(check.name)):
            pytest.skip(f"{reason} (docs/oci.md)")
    await check(substrate)


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dutyfree.conformance", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_command_line() -> None:
    done = run("scripted", "-k", "files and not round_trips or abilities.fork")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert re.fullmatch(r"\d+ passed, 0 failed, \d+ not offered, \d+ left out", lines[-1])
    assert any(line.startswith("passed") and line.endswith("fork") for line in lines)
    assert any("files_are_the_commands_files  the substrate runs no real commands" in line for line in lines)
    assert "round_trips" not in done.stdout


def test_failures_are_told_with_their_reason() -> None:
    done = run("scripted", "-k", "write_makes_parents", "--option", "fail_phase=dispatch", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert (found["failed"], found["substrate"]) == (1, "scripted")
    assert "DispatchError: dispatch failed by script" in found["results"][0]["reason"]


def test_the_list_names_every_check() -> None:
    lines = run("--list").stdout.splitlines()
    assert [line.split()[1] for line in lines] == [check.name for check in CHECKS]
    assert all(check.promise for check in CHECKS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "unknown substrate 'nowhere'"),
        (("scripted", "--option", "seed=x"), "seed must be a whole number"),
        (("scripted", "--option", "seed"), "is not NAME=VALUE"),
        (("scripted", "-k", "nothing_like_it"), "no check is left to run"),
        (("scripted", "--only", "overwritting"), "no check 'overwritting' (did you mean 'overwriting'?)"),
        (("scripted", "--leave-out", "fliles"), "no check 'fliles' (did you mean 'files'?)"),
        (("scripted", "--only", "fork", "--leave-out", "fork"), "no check is left to run"),
        (("scripted", "--patience", "0"), "not a number above 0"),
        (
            ("no_such_module:Mine",),
            "cannot be loaded from no_such_module:Mine: No module named 'no_such_module' (is its",
        ),
        ((), "name a substrate"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_checks_are_chosen_by_name_and_subject() -> None:
    chosen = ("--only", "trees", "--only", "commands.environment", "--leave-out", "link_round_trip")
    lines = run("--list", *chosen).stdout.splitlines()
    assert {line.split()[0] for line in lines} == {"commands", "trees"}
    assert [line.split()[1] for line in lines[:1]] == ["environment"]
    assert not any("link_round_trip" in line for line in lines)
    told = run("scripted", "--only", "overwriting").stdout.splitlines()
    assert told[-1] == f"1 passed, 0 failed, 0 not offered, {len(CHECKS) - 1} left out"


def test_the_help_teaches() -> None:
    told = run("--help").stdout
    for word in ("--leave-out", "--only", "exit status", "my_package:MySubstrate", "deadline"):
        assert word in told


async def test_a_check_that_does_not_end_fails(scripted: Substrate) -> None:
    async def never(_: Substrate) -> None:
        await anyio.sleep_forever()

    result = await judge(scripted, Check("stuck", "", "none", never, 0.01))
    assert result.outcome == "failed"
    assert result.reason.startswith("did not end within 0.01 s")
    assert f"at {__file__}:" in result.reason


BREAKING = """
import os, time
from contextlib import asynccontextmanager
import anyio
from dutyfree.substrates.scripted import Scripted

async def hang():
    await anyio.sleep_forever()

async def block():
    time.sleep(600)

async def refuse_to_be_cancelled():
    with anyio.CancelScope(shield=True):
        await anyio.sleep(600)

async def leave():
    raise SystemExit(3)

async def leave_from_a_task():
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave)

async def die():
    os._exit(4)

async def fail():
    raise ZeroDivisionError("of mine")

WAYS = {
    "a/b/c/file": hang,                  # write_makes_parents
    "plain": refuse_to_be_cancelled,     # write_modes
    "directory/file": block,             # reading_what_is_not_there
    "d/b": leave,                        # listing
    "tree/a/b/c": leave_from_a_task,     # removing
    "trace": die,                        # fresh_after_another
    "only one": fail,                    # sandboxes_are_apart
}

class Breaking(Scripted):
    @asynccontextmanager
    async def sandbox(self, recipe=None, *, limits=None, labels=None):
        async with super().sandbox(recipe, limits=limits, labels=labels) as sandbox:
            write = sandbox.write

            async def break_or_write(path, data, *, mode=0o644):
                if path in WAYS:
                    await WAYS[path]()
                await write(path, data, mode=mode)

            sandbox.write = break_or_write
            yield sandbox

class NeverOpens(Scripted):
    async def __aenter__(self):
        raise SystemExit("not today")

class NeverCloses(Scripted):
    async def __aexit__(self, *_):
        os._exit(5)
"""

BROKEN = {
    "write_makes_parents": "did not end within 6 s",
    "write_modes": "nor could it be cancelled",
    "reading_what_is_not_there": "nor could it be cancelled",
    "listing": "SystemExit: 3",
    "removing": "SystemExit: 3",
    "fresh_after_another": "its process ended, with status 4",
    "sandboxes_are_apart": "ZeroDivisionError: of mine",
}
SOUND = {"overwriting", "listing_what_is_not_there", "concurrent_files", "errors_in_the_body_pass"}


@pytest.fixture
def breaking(tmp_path: Path) -> Path:
    (tmp_path / "breaking.py").write_text(BREAKING)
    return tmp_path


@pytest.mark.slow
def test_whatever_a_check_does_the_others_go_on(breaking: Path) -> None:
    only = [word for name in (*BROKEN, *SOUND) for word in ("--only", name)]
    done = run("breaking:Breaking", *only, "--patience", "0.05", "--json", path=breaking)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    reasons = {result["check"]: result["reason"] for result in found["results"]}
    assert (found["passed"], found["failed"]) == (len(SOUND), len(BROKEN))
    for name, reason in BROKEN.items():
        assert reason in reasons[name], f"{name}: {reasons[name]}"
    places = {"write_makes_parents": "hang", "write_modes": "refuse_to_be_cancelled"}
    for name, place in {**places, "reading_what_is_not_there": "block"}.items():
        assert re.search(rf"in: await sandbox.write.*, at .*breaking.py:\d+ in {place}\)", reasons[name]), (
            reasons
        )


def test_a_substrate_that_ends_the_process_as_it_opens_or_closes(breaking: Path) -> None:
    done = run("breaking:NeverOpens", "--only", "overwriting", path=breaking)
    assert (done.returncode, done.stdout) == (2, "")
    assert "SystemExit: not today" in done.stderr
    done = run("breaking:NeverCloses", "--only", "overwriting", path=breaking)
    assert done.returncode == 1
    assert "closing  its process ended, with status 5" in done.stdout
    assert "1 passed, 1 failed" in done.stdout


def test_an_interrupt_ends_it_with_what_is_known(breaking: Path) -> None:
    only = ("--only", "overwriting", "--only", "write_modes")
    command = [sys.executable, "-m", "dutyfree.conformance", "breaking:Breaking", *only]
    with speaking(*command, env={**os.environ, "PYTHONPATH": str(breaking)}) as (suite, first):
        assert "overwriting" in first
        suite.send_signal(signal.SIGINT)
        told, _ = suite.communicate()
        assert suite.returncode == 130
    assert told.startswith("1 passed, 0 failed")
    assert told.endswith("1 not run\n")
