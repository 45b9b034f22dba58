"""The docker substrate against a real engine: what the conformance suite cannot ask of every substrate."""

from __future__ import annotations

import io
import os
import shutil
import signal
import socket
import tarfile
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Limits, Recipe, Stage, substrates
from dutyfree import study_image as study
from dutyfree.contract import errors
from dutyfree.contract.abilities import Pausable
from dutyfree.contract.entries import Links
from dutyfree.study_image import REFERENCE
from dutyfree.substrates.docker import DockerConfig, adopt_image, import_study, socket_path
from dutyfree.substrates.docker import images as image_module
from dutyfree.substrates.docker.engine import Engine, EngineError, EngineLost
from dutyfree.substrates.docker.execution import KEEPER, ExecRequest, Execution
from dutyfree.substrates.docker.gc import PROCESS
from dutyfree.substrates.docker.guest import ContainerControl
from dutyfree.substrates.docker.images import identify, inspect
from dutyfree.substrates.docker.sandbox import DockerSandbox
from dutyfree.substrates.docker.substrate import DockerSubstrate
from dutyfree.substrates.local.archive import unpack
from dutyfree.substrates.local.owner import identity
from tests.awaiting import appeared, enter, overrun, overrun_beside, together
from tests.docker_engine import containers, images, proxied, until_gone
from tests.engine import counts
from tests.engine.images import composing
from tests.processes import Speaking, speaking_python

BUSYBOX = "dutyfree/test-busybox:latest"


# --- Opening ---------------------------------------------------------------------------------------


async def test_no_engine_is_unavailable_with_a_remedy(tmp_path: Path) -> None:
    missing = str(tmp_path / "docker.sock")
    with pytest.raises(errors.Unavailable, match="no Docker engine answers") as caught:
        await enter(dutyfree.open("docker", host=missing))
    assert "docker-engine start" in caught.value.remedy
    answer = await substrates.probe("docker", host=missing)
    assert not answer.available
    assert "docker-engine start" in answer.remedy


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-OpenSSH_9\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"]
)
async def test_something_else_at_the_socket_is_unavailable(tmp_path: Path, answer: bytes) -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            if answer:
                await stream.receive()
                await stream.send(answer)

    path = str(tmp_path / "docker.sock")
    listener = await anyio.create_unix_listener(path)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        with pytest.raises(errors.Unavailable):
            await enter(dutyfree.open("docker", host=f"unix://{path}"))
        assert not (await substrates.probe("docker", host=path)).available
        tasks.cancel_scope.cancel()


async def test_only_unix_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    with pytest.raises(errors.Unavailable, match="is not a Unix socket"):
        await enter(dutyfree.open("docker"))
    assert socket_path("unix:///a/b") == "/a/b"


async def test_probe_and_facts(docker: DockerSubstrate) -> None:
    answer = await substrates.probe("docker")
    assert answer.available
    assert REFERENCE in answer.detail
    facts = await docker.facts()
    assert facts["engine"].startswith("Docker ")
    assert facts["image id"].startswith("sha256:")
    assert facts["python"].startswith("3.")
    assert facts["git"].startswith("2.")
    assert all(isinstance(value, str) for value in facts.values())


# --- Sandboxes -------------------------------------------------------------------------------------


async def test_spans_labels_and_environment(docker: DockerSubstrate, engine: Engine) -> None:
    async with docker.sandbox(labels={"trial": "7"}) as sandbox:
        assert [span.name for span in sandbox.spans] == ["create", "start"]
        seen = await sandbox.exec("pwd; echo $HOME; cat /proc/1/comm")
        assert seen.stdout == b"/workspace\n/workspace\ndocker-init\n"
        assert [span.name for span in seen.spans] == ["dispatch", "collect"]
        assert sum(span.seconds for span in seen.spans) < seen.seconds
        facts = await engine.request("GET", f"/containers/{sandbox.id}/json")
        labels = facts["Config"]["Labels"]
        assert (labels["dutyfree"], labels["trial"]) == ("1", "7")
        assert facts["HostConfig"]["NetworkMode"] == "none"
    assert await containers(engine, docker.owner) == []


async def test_network_on_reaches_this_host(docker: DockerSubstrate) -> None:
    assert docker.host_address is not None
    with socket.create_server((docker.host_address, 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('{docker.host_address}', {port}), 60)"
        async with docker.sandbox(limits=Limits(network="on")) as sandbox:
            assert (await sandbox.exec(["python3", "-c", connect])).ok
        async with docker.sandbox() as sandbox:
            assert not (await sandbox.exec(["python3", "-c", connect])).ok


async def test_memory_limit_kills(docker: DockerSubstrate) -> None:
    async with docker.sandbox(limits=Limits(memory=64 << 20)) as sandbox:
        seen = await sandbox.exec(["python3", "-c", "bytearray(200 << 20)"])
        assert (seen.exit_code, seen.signal) == (137, 9)
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_pids_limit_holds(docker: DockerSubstrate) -> None:
    async with docker.sandbox(limits=Limits(pids=20)) as sandbox:
        seen = await sandbox.exec("for i in $(seq 40); do sleep 100 & done", timeout=60)
        assert b"fork" in seen.stderr.lower()


async def test_cpu_limit_is_set(docker: DockerSubstrate, engine: Engine) -> None:
    async with docker.sandbox(limits=Limits(cpus=0.5)) as sandbox:
        facts = await engine.request("GET", f"/containers/{sandbox.id}/json")
        assert facts["HostConfig"]["NanoCpus"] == 500_000_000


async def test_refused_creation_is_a_create_error(docker: DockerSubstrate, engine: Engine) -> None:
    for limits in (Limits(memory=1), Limits(cpus=100_000)):
        with pytest.raises(errors.CreateError):
            await enter(docker.sandbox(limits=limits))
    with pytest.raises(errors.CreateError, match="cannot be pulled"):
        await enter(docker.sandbox(Recipe(image="localhost:1/none:latest")))
    assert await containers(engine, docker.owner) == []


async def test_a_paused_container_runs_no_command(docker: DockerSubstrate) -> None:
    async with docker.sandbox() as sandbox:
        assert isinstance(sandbox, Pausable)
        await sandbox.pause()
        with pytest.raises(errors.DispatchError, match="paused"):
            await sandbox.exec("true")
        await sandbox.resume()
        assert (await sandbox.exec("true")).ok


async def test_timeout_kills_all_kinds_of_children(docker: DockerSubstrate) -> None:
    commands = (
        "echo part; setsid sleep 610 & sleep 610",
        ["setsid", "-f", "-w", "sleep", "610"],
        ["env", "-i", "sleep", "610"],
        "exec >&- 2>&-; sleep 610",
        "(env -i setsid sleep 610 >/dev/null 2>&1 &) ; sleep 610",
    )
    async with docker.sandbox() as sandbox:
        for command in commands:
            seen = await sandbox.exec(command, timeout=0.4)
            assert (seen.timed_out, seen.exit_code, seen.signal) == (True, 137, 9), command
            assert seen.seconds < 610  # of the command's own
            left = await sandbox.exec("ps -eo args | grep '[s]leep 610'")
            assert left.stdout == b"", command


async def test_timeout_ends_no_command_that_began_later(docker: DockerSubstrate) -> None:
    async with docker.sandbox() as sandbox:
        seen, later = await overrun_beside(sandbox)
    assert seen.timed_out
    assert later.stdout == b"lives\n"


@pytest.mark.parametrize("timeout", [0.0, 0.003, 0.02, 0.04])
async def test_timeout_before_the_command_runs(docker: DockerSubstrate, timeout: float) -> None:
    async with docker.sandbox() as sandbox:
        seen = await sandbox.exec(["sleep", "620"], timeout=timeout)
        assert seen.timed_out
        await anyio.sleep(0.2)
        assert (await sandbox.exec("ps -eo args | grep '[s]leep 620'")).stdout == b""


async def test_timeout_without_sight_of_the_processes(
    docker: DockerSubstrate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a user who is not root, or an engine on another machine: killed from inside."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    async with docker.sandbox() as sandbox:
        command = "setsid sleep 630 & (env -i setsid sleep 630 &) ; echo part; sleep 630"
        seen = await overrun(sandbox, command, b"part")
        assert (seen.timed_out, seen.stdout) == (True, b"part\n")
        assert (await sandbox.exec("ps -eo args | grep '[s]leep 630'")).stdout == b""


@pytest.mark.parametrize("user", [0, pytest.param(1000, marks=pytest.mark.slow)])
async def test_no_process_poses_as_the_keeper(
    docker: DockerSubstrate, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    """It has an empty environment, and the command line of the container's own process, which lives on."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    async with docker.sandbox() as sandbox:
        command = f"(env -i setsid {' '.join(KEEPER)} &) ; echo part; sleep 640"
        for _ in range(2):
            seen = await overrun(sandbox, command, b"part")
            assert (seen.timed_out, seen.stdout) == (True, b"part\n")
            seen = await sandbox.exec("ps -eo args | grep '^[s]leep'")
            assert seen.stdout.decode().splitlines() == [" ".join(KEEPER)]


async def test_program_that_prints_like_the_engine(docker: DockerSubstrate) -> None:
    """Only what never ran is told as such; a program may print and exit as it likes."""
    async with docker.sandbox() as sandbox:
        seen = await sandbox.exec("echo 'OCI runtime exec failed: no such file or directory'; exit 126")
        assert (seen.exit_code, seen.stderr) == (126, b"")
        assert seen.stdout.startswith(b"OCI runtime")


async def test_shell_line_numbers_are_true(docker: DockerSubstrate) -> None:
    async with docker.sandbox() as sandbox:
        assert b"sh: 1: nope" in (await sandbox.exec("nope")).stderr
        assert (await sandbox.exec("")).ok
        assert (await sandbox.exec("# only a comment")).ok
        assert (await sandbox.exec("echo $?")).stdout == b"0\n"


async def test_container_that_is_gone(docker: DockerSubstrate, engine: Engine, tmp_path: Path) -> None:
    async with docker.sandbox() as sandbox:
        failures: list[Exception] = []

        async def run() -> None:
            try:
                await sandbox.exec("sleep 60")
            except Exception as error:
                failures.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.sleep(0.5)
            await engine.request("DELETE", f"/containers/{sandbox.id}", query={"force": "1"})
        assert not failures or isinstance(failures[0], errors.SandboxClosed)
        for call in (
            sandbox.exec("true"),
            sandbox.read("x"),
            sandbox.write("x", b""),
            sandbox.list("."),
            sandbox.remove("x"),
            sandbox.upload(Path(__file__), "x"),
            sandbox.download("x", tmp_path / "x"),
            sandbox.pause(),
        ):
            with pytest.raises(errors.SandboxClosed):
                await call


async def test_links_on_the_way_are_followed_the_last_is_not(docker: DockerSubstrate, tmp_path: Path) -> None:
    async with docker.sandbox() as sandbox:
        await sandbox.exec("mkdir d; echo x > d/f; ln -s d link")
        await sandbox.download("link/f", tmp_path / "file")
        assert (tmp_path / "file").read_bytes() == b"x\n"
        await sandbox.download("link", tmp_path / "link", outside_links=True)
        assert os.readlink(tmp_path / "link") == "d"


# --- The engine goes away --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
async def test_engine_that_dies_under_a_command(
    docker: DockerSubstrate, engine: Engine, tmp_path: Path
) -> None:
    label = ""
    failures: list[Exception] = []

    async def run(sandbox: dutyfree.Sandbox) -> None:
        try:
            await sandbox.exec("touch begun; sleep 60")
        except Exception as error:
            failures.append(error)

    async with proxied(tmp_path) as proxy:
        with pytest.raises(errors.CleanupError) as caught:  # noqa: PT012
            async with dutyfree.open("docker", host=proxy.path) as opened:
                label = opened.owner
                async with opened.sandbox() as sandbox, anyio.create_task_group() as tasks:
                    tasks.start_soon(run, sandbox)
                    await appeared(sandbox, "begun")
                    await proxy.break_off()
                    with pytest.raises(errors.CreateError):
                        await enter(opened.sandbox())
                    with pytest.raises(errors.DispatchError):
                        await sandbox.exec("true")
        assert "docker rm -f" in caught.value.remedy
    assert [type(error) for error in failures] == [errors.ExecError]
    left = await containers(engine, label)
    assert len(left) == 1
    await engine.request("DELETE", f"/containers/{left[0]}", query={"force": "1"})


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
async def test_engine_that_hangs(docker: DockerSubstrate, engine: Engine, tmp_path: Path) -> None:
    del docker  # whose image is there already
    label = ""
    async with proxied(tmp_path) as proxy:
        options: dict[str, Any] = {"host": proxy.path, "answer_seconds": 5.0, "remove_seconds": 5.0}
        with anyio.fail_after(60):
            with pytest.raises(errors.CleanupError, match=r"does not answer within 5 s"):  # noqa: PT012
                async with dutyfree.open("docker", **options) as opened:
                    label = opened.owner
                    async with opened.sandbox():
                        proxy.hang()
            with pytest.raises(errors.Unavailable, match="does not answer"):
                await enter(dutyfree.open("docker", **options))
    for container in await containers(engine, label):
        await engine.request("DELETE", f"/containers/{container}", query={"force": "1"})


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
async def test_failed_removal_does_not_hide_the_failure_before_it(engine: Engine, tmp_path: Path) -> None:
    label = ""
    async with proxied(tmp_path) as proxy:
        with pytest.raises(KeyError):  # noqa: PT012
            async with dutyfree.open("docker", host=proxy.path) as opened:
                label = opened.owner
                async with opened.sandbox():
                    await proxy.break_off()
                    raise KeyError
    for container in await containers(engine, label):
        await engine.request("DELETE", f"/containers/{container}", query={"force": "1"})


async def test_engine_that_never_pauses(tmp_path: Path) -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await anyio.sleep_forever()

    path = str(tmp_path / "docker.sock")
    async with await anyio.create_unix_listener(path) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        async with Engine(path, answer_seconds=0.1) as engine:
            control = ContainerControl(engine, "container")
            sandbox = DockerSandbox(engine, "container", Limits(), {}, ())
            with anyio.fail_after(60):
                with pytest.raises(errors.ExecError, match="does not answer within"):
                    await control.freeze()
                await control.thaw()
                with pytest.raises(errors.DispatchError, match="does not answer within"):
                    await sandbox.pause()
        tasks.cancel_scope.cancel()


async def test_engine_that_goes_away_between_two_questions() -> None:
    class Leaving(Engine):
        async def request(self, method: str, path: str, **_: Any) -> Any:
            raise EngineError(500, "lost it") if path.startswith("/exec/") else EngineLost("gone")

    request = ExecRequest(command="true", cwd="/", output=1)
    execution = Execution(Leaving("/nowhere"), "container", request, alone=lambda: True)
    with pytest.raises(errors.ExecError, match="closed the connection: gone"):
        await execution._inspect()


# --- Nothing is left behind ------------------------------------------------------------------------

OWNER = """
    import anyio, dutyfree, sys

    async def main():
        recipe = dutyfree.Recipe(stages=(dutyfree.Stage("setup", commands=("touch made",)),))
        async with dutyfree.open("docker") as substrate, substrate.sandbox(recipe):
            print(substrate.owner, flush=True)
            await anyio.sleep_forever()

    anyio.run(main)
"""


@pytest.fixture
def owner() -> Iterator[Speaking]:
    """A process with a sandbox, and its label."""
    with speaking_python(OWNER) as (process, label):
        assert label
        yield process, label
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_killed_owner_leaves_nothing(owner: Speaking, engine: Engine, number: signal.Signals) -> None:
    process, label = owner
    assert len(await containers(engine, label)) == 1
    assert len(await images(engine, label)) == 1
    process.send_signal(number)
    await until_gone(engine, label)


async def test_leftovers_of_a_dead_owner_are_removed(owner: Speaking, engine: Engine) -> None:
    process, label = owner
    async with dutyfree.open("docker"):
        assert len(await containers(engine, label)) == 1, "a living owner's sandbox was touched"
    pids = await anyio.to_thread.run_sync(counts.children, process.pid)
    assert pids, "the owner has no reaper"
    for pid in (*pids, process.pid):
        os.kill(pid, signal.SIGKILL)
    await anyio.to_thread.run_sync(process.wait)
    assert len(await containers(engine, label)) == 1
    async with dutyfree.open("docker"):
        assert await containers(engine, label) == []


async def test_what_another_machine_made_is_left_alone(docker: DockerSubstrate, engine: Engine) -> None:
    del docker  # whose image is there already
    boot, space, pid, start, machine = (await anyio.to_thread.run_sync(identity) or "").split("/")
    owners = {
        "another machine": (f"other-boot/{space}/{pid}/{start}/other-machine", True),
        "another pid namespace": (f"{boot}/1/{pid}/{start}/{machine}", True),
        "a former boot of this one": (f"other-boot/{space}/{pid}/{start}/{machine}", False),
    }
    made = {}
    for name, (owner, _) in owners.items():
        labels = {"dutyfree": "1", PROCESS: owner}
        body = {"Image": REFERENCE, "Cmd": KEEPER, "Labels": labels}
        made[name] = (await engine.request("POST", "/containers/create", json=body))["Id"]
    try:
        async with dutyfree.open("docker"):
            left = await containers(engine, "dutyfree=1")
        for name, (_, stays) in owners.items():
            assert (made[name] in left) == stays, name
    finally:
        for container in set(made.values()) & set(await containers(engine, "dutyfree=1")):
            await engine.request("DELETE", f"/containers/{container}", query={"force": "1"})


async def test_cancelled_creation_leaves_nothing(docker: DockerSubstrate, engine: Engine) -> None:
    for step in range(12):
        with anyio.move_on_after(step * 0.025):
            async with docker.sandbox():
                await anyio.sleep_forever()
    assert await containers(engine, docker.owner) == []


# --- Images and stages -----------------------------------------------------------------------------


async def test_stages_are_built_once(docker: DockerSubstrate, engine: Engine, tmp_path: Path) -> None:
    source = tmp_path / "data"
    source.write_text(uuid.uuid4().hex)
    first = Stage("files", files={"got/data": source})
    second = Stage("setup", commands=("date +%N > stamp", ("cp", "got/data", "copy")))
    recipe = Recipe(stages=(first, second))
    stamps = set()

    async def use() -> None:
        async with docker.sandbox(recipe) as sandbox:
            stamps.add(await sandbox.read("stamp"))
            assert (await sandbox.read("copy")).decode() == source.read_text()

    await together(*[use] * 4)
    assert len(stamps) == 1
    # A longer recipe starts from the shorter one's image.
    longer = Recipe(stages=(*recipe.stages, Stage("setup", commands=("touch longer",))))
    async with docker.sandbox(longer) as sandbox:
        assert {await sandbox.read("stamp")} == stamps
        assert {entry.name for entry in await sandbox.list(".")} == {"got", "copy", "stamp", "longer"}
    assert await containers(engine, docker.owner) == []


async def test_images_of_stages_go_with_their_owner(engine: Engine) -> None:
    stages = tuple(Stage("setup", commands=(f"echo {uuid.uuid4().hex} > {n}",)) for n in range(3))
    async with dutyfree.open("docker") as opened:
        assert isinstance(opened, DockerSubstrate)
        await opened.prepare(Recipe(stages=stages))
        assert len(await images(engine, opened.owner)) == 3
    assert await images(engine, opened.owner) == []


async def test_failing_stage_is_named(docker: DockerSubstrate, engine: Engine) -> None:
    stages = (Stage("setup", commands=("true", "echo said; echo told >&2; exit 3")),)
    with pytest.raises(errors.CreateError, match=r"stage 1 \(setup\).*exit 3.*exit code 3(?s:.*)told"):
        await docker.prepare(Recipe(stages=stages))
    with pytest.raises(errors.CreateError, match="stage 1"):
        await docker.prepare(Recipe(stages=(Stage("files", files={"x": Path("/nowhere")}),)))
    assert await containers(engine, docker.owner) == []


def busybox_archive(program: str) -> io.BytesIO:
    links = "sh cat chmod mkdir rm find stat xargs sleep readlink grep kill echo ls ps setsid env true id"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as tar:
        tar.add(program, arcname="bin/busybox")
        for name in links.split():
            member = tarfile.TarInfo(f"bin/{name}")
            member.type, member.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(member)
    return buffer


@pytest.fixture
async def busybox(engine: Engine) -> str:
    """A small foreign image: no GNU tools, no python."""
    program = shutil.which("busybox")
    if program is None:
        pytest.skip("no busybox to make a small image from; to enable it: apt-get install busybox-static")
    buffer = busybox_archive(program)
    size = buffer.tell()
    buffer.seek(0)
    repository, _, tag = BUSYBOX.partition(":")
    query = {"fromSrc": "-", "repo": repository, "tag": tag}
    async with engine.stream("POST", "/images/create", query=query, content=buffer, size=size) as response:
        assert b'"error"' not in await response.body()
    return BUSYBOX


async def test_image_without_gnu_tools(busybox: str) -> None:
    async with dutyfree.open("docker", image=busybox, init=False) as opened, opened.sandbox() as sandbox:
        if not (seen := await sandbox.exec("echo $HOME")).ok:
            pytest.skip(f"this busybox is not static: {seen.stderr!r}; apt-get install busybox-static")
        for name in ("plain", "new\nline", "-dash", "ü"):
            await sandbox.write(f"sub/{name}", name.encode(), mode=0o600)
            assert await sandbox.read(f"sub/{name}") == name.encode()
        await sandbox.exec("mkdir sub/dir; ln -s x sub/link")
        listed = {entry.name: (entry.kind, entry.mode) for entry in await sandbox.list("sub")}
        assert listed["new\nline"] == ("file", 0o600)
        assert (listed["dir"][0], listed["link"][0]) == ("directory", "link")
        assert len(listed) == 6
        assert await sandbox.list("sub/dir") == ()
        await sandbox.remove("sub")
        with pytest.raises(FileNotFoundError):
            await sandbox.list("sub")
        command = "setsid sleep 640 & (env -i setsid sleep 640 &); echo part; sleep 640"
        seen = await overrun(sandbox, command, b"part")
        assert (seen.timed_out, seen.stdout) == (True, b"part\n")
        assert (await sandbox.exec("ps | grep '[s]leep 640'")).stdout == b""


async def test_study_image_is_imported_when_the_engine_lacks_it(engine: Engine) -> None:
    found = await import_study(engine)
    facts = await inspect(engine, REFERENCE)
    assert facts is not None
    assert facts["Id"] == found
    assert await import_study(engine) == found


def test_the_image_asked_for_last_is_the_studys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "image.tar").write_bytes(b"held")
    built = study._publish(tmp_path / "images" / "image.tar", study.suite())
    adopted: dict[str, Any] = {"Config": {"Labels": None}}
    imported = {"Config": {"Labels": {image_module.DIGEST_LABEL: built.digest}}}
    older = {"Config": {"Labels": {image_module.DIGEST_LABEL: "sha256:other"}}}
    stays = image_module._stays
    assert stays(adopted, built)
    anyio.run(partial(study.build, choose=False))
    assert stays(adopted, built)
    anyio.run(study.build)
    assert not stays(adopted, built)
    assert stays(imported, built)
    assert not stays(older, built)


async def test_pull_from_a_registry(engine: Engine, busybox: str, tmp_path: Path) -> None:
    said: list[str] = []
    name = "dutyfree/test-adopted:latest"
    with composing.registry(tmp_path / "registry") as address:
        reference = f"{address}/team/busybox"
        await engine.request("POST", f"/images/{busybox}/tag", query={"repo": reference, "tag": "latest"})
        await push(engine, reference)
        await engine.request("DELETE", f"/images/{reference}:latest")
        assert await identify(engine, f"{reference}:latest") is None
        with pytest.raises(errors.Unavailable, match="lacks python3"):
            await adopt_image(reference, name, ("sh", "python3"), host=None, progress=said.append)
        assert any("Pulling" in line or "Digest" in line for line in said), said
        assert await identify(engine, name) is None
        assert await adopt_image(reference, name, ("sh",), host=None, progress=said.append)
        assert await identify(engine, name) is not None
        with pytest.raises(errors.Unavailable, match="cannot be pulled"):
            await adopt_image(f"{reference}-not", name, ("sh",), host=None, progress=said.append)
    for image in (name, f"{reference}:latest"):
        await engine.request("DELETE", f"/images/{image}")


async def push(engine: Engine, reference: str) -> None:
    connection = await engine.connect()
    headers = {"X-Registry-Auth": "e30="}
    connection.send("POST", f"{engine.prefix}/images/{reference}/push?tag=latest", 0, headers)
    response = await connection.head()
    body = await response.body()
    connection.close()
    if response.status != 200 or b'"error"' in body:
        raise EngineError(response.status, body.decode())


# --- Archives --------------------------------------------------------------------------------------


def archive(*members: tuple[str, dict[str, Any], bytes]) -> io.BytesIO:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, fields, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for field, value in fields.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(content))
    buffer.seek(0)
    return buffer


ALL_LINKS = Links("top", outside=True)


@pytest.mark.parametrize("name", ["top/../../out", "/out", "../out", "top/a/../../../out"])
def test_hostile_names_cannot_leave_the_target(tmp_path: Path, name: str) -> None:
    top = ("top", {"type": tarfile.DIRTYPE, "mode": 0o755}, b"")
    with pytest.raises(PermissionError):
        unpack(archive(top, (name, {}, b"evil")), tmp_path / "in" / "target", ALL_LINKS)
    assert not list(tmp_path.rglob("out"))


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    top = ("top", {"type": tarfile.DIRTYPE, "mode": 0o755}, b"")
    link = ("top/link", {"type": tarfile.SYMTYPE, "linkname": str(outside)}, b"")
    with pytest.raises(PermissionError, match="link"):
        unpack(archive(top, link, ("top/link/file", {}, b"evil")), tmp_path / "target", ALL_LINKS)
    assert list(outside.iterdir()) == []
    (outside / "kept").write_bytes(b"good")
    over = ("top/link", {"type": tarfile.SYMTYPE, "linkname": str(outside / "kept")}, b"")
    unpack(archive(top, over, ("top/link", {}, b"evil")), tmp_path / "other", ALL_LINKS)
    assert (outside / "kept").read_bytes() == b"good"
    hard = ("top/hard", {"type": tarfile.LNKTYPE, "linkname": "../outside/kept"}, b"")
    with pytest.raises(PermissionError):
        unpack(archive(top, hard), tmp_path / "third", ALL_LINKS)


def test_links_of_an_earlier_copy_are_not_followed(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir(0o700)
    (outside / "kept").write_bytes(b"good")
    top = ("top", {"type": tarfile.DIRTYPE, "mode": 0o755}, b"")
    links = {"directory": outside, "file": outside / "kept", "hard": outside / "kept", "new": outside / "new"}
    planted = [(f"top/{n}", {"type": tarfile.SYMTYPE, "linkname": str(to)}, b"") for n, to in links.items()]
    later = archive(
        top,
        ("top/directory", {"type": tarfile.DIRTYPE, "mode": 0o777}, b""),
        ("top/directory/evil", {}, b"evil"),
        ("top/file", {}, b"evil"),
        ("top/new", {}, b"evil"),
        ("top/hard", {"type": tarfile.LNKTYPE, "linkname": "top/file"}, b""),
    )
    for _ in range(2):
        unpack(archive(top, *planted), target, ALL_LINKS)
        unpack(later, target, ALL_LINKS)
        assert (target / "hard").read_bytes() == (target / "directory" / "evil").read_bytes() == b"evil"
        assert [(path.name, path.read_bytes()) for path in outside.iterdir()] == [("kept", b"good")]
        assert outside.stat().st_mode & 0o777 == 0o700
        shutil.rmtree(target)
        target.symlink_to(outside)
        later.seek(0)
    # A directory that the archive does not hold itself may be an earlier link.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "link").symlink_to(outside)
    with pytest.raises(PermissionError, match="link/file"):
        unpack(archive(top, ("top/link/file", {}, b"evil")), tmp_path / "other", ALL_LINKS)


def test_config_is_frozen_and_checked() -> None:
    with pytest.raises(dutyfree.errors.OptionError, match="no option 'socket'"):
        dutyfree.open("docker", socket="/x")
    assert DockerConfig().image == REFERENCE
