"""What docs/service.md shows runs: its commands, its programs, the unit, and the container."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import eventually, ran, speaking
from tests.serving import certificates, serving

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/service.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
HERE = "http://127.0.0.1:7800"


def block(containing: str, kind: str = "") -> str:
    """The first block of a kind with this text in it."""
    return next(content for found, content in BLOCKS if found == kind and containing in content)


def shell(program: str, **options: object) -> subprocess.CompletedProcess[str]:
    return ran(["sh", "-ec", program], **options)


@pytest.mark.native
def test_the_programs_of_the_service_run(tmp_path: Path) -> None:
    """Against a server that listens elsewhere."""
    first = block("curl", "sh")
    assert first in (ROOT / "README.md").read_text()
    with serving(tmp_path / "state") as url:
        done = shell(first.replace(HERE, url))
        assert (done.returncode, "hello\\nLinux" in done.stdout) == (0, True), done
        done = ran([sys.executable, "-c", block("import asyncio", "python").replace(HERE, url)])
        assert done.stdout.startswith("0 b'42\\n'"), done
        done = shell(block("/v1/events", "sh").replace(HERE, url))
        events = re.findall("^event: (.+)", done.stdout, re.MULTILINE)
        assert events[-3:] == ["action", "released", "state"], done
        done = shell(block("/ports/", "sh").replace(HERE, url))
        assert (done.returncode, "Directory listing" in done.stdout) == (0, True), done
        create = first.splitlines()[0]
        done = shell(f"{create}\n{block('keep_alive', 'sh')}".replace(HERE, url))
        assert json.loads(done.stdout) == [], done
        done = shell(f"ID=gone\n{block('keep_alive', 'sh')}".replace(HERE, url))
        assert json.loads(done.stdout) == ["gone"], done


@pytest.fixture
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the command ``dutyfree``, as after an installation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.native
def test_the_commands_for_other_machines_run(in_an_empty_directory: Path) -> None:
    root, chain, key = certificates(in_an_empty_directory)
    create, serve = block("dutyfree token create trainer\ndutyfree serve").splitlines()
    assert serve == "dutyfree serve --listen 0.0.0.0:7800 --certificate server.pem --key server.key"
    token = shell(f"{create} --state state", check=True).stdout.strip()
    (limit,) = set(re.findall(r"`(dutyfree token limit [^`]*)`", PAGE))
    shell(f"{limit} --state state", check=True)
    listed = shell("dutyfree token ls --state state", check=True).stdout
    assert "trainer" in listed
    assert "100" in listed
    tls = ("--certificate", str(chain), "--key", str(key))
    with serving(in_an_empty_directory / "state", *tls, listen="0.0.0.0:0") as url:
        address = url.replace("0.0.0.0", "127.0.0.1")
        (header,) = re.findall(r"`-H \"(Authorization: Bearer TOKEN)\"`", PAGE)
        ask = ("curl", "-s", "--cacert", str(root), "-o", os.devnull, "-w", "%{http_code}")
        with_token = ("-H", header.replace("TOKEN", token))
        assert ran([*ask, f"{address}/v1/sandboxes"]).stdout == "401"
        assert ran([*ask, *with_token, f"{address}/v1/sandboxes"]).stdout == "200"
        identity = listed.splitlines()[-1].split()[0]
        shell(f"dutyfree token revoke {identity} --state state", check=True)
        assert eventually(lambda: ran([*ask, *with_token, f"{address}/v1/sandboxes"]).stdout == "401")


@pytest.mark.native
def test_the_command_of_an_upgrade_runs(in_an_empty_directory: Path) -> None:
    assert block("--replace") == "dutyfree serve --replace\n"
    state = in_an_empty_directory / "state"
    command = ("dutyfree", "serve", "--listen", "127.0.0.1:0", "--state", str(state))
    with speaking(*command) as (old, line):
        assert "serving sandboxes" in line
        with serving(state, "--replace"):
            assert old.wait(60) == 0


@pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="no systemd-analyze; to enable it: apt-get install systemd"
)
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    command = Path(sys.executable).parent / "dutyfree"
    unit = tmp_path / "dutyfree.service"
    unit.write_text(block("[Unit]").replace("/opt/dutyfree/.venv/bin/dutyfree", str(command)))
    done = ran(["systemd-analyze", "verify", "--man=no", str(unit)])
    assert (done.returncode, "dutyfree.service" in done.stderr) == (0, False), done.stderr


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.docker
@pytest.mark.root("the container makes namespaces and control groups")
@pytest.mark.skipif(
    not Path("/sys/fs/cgroup/memory").exists(),
    reason="the container was tried with control groups of version 1 only",
)
def test_the_container_serves(built: str) -> None:
    """The commands of the page, with a base that is here, and names that are ours."""
    name = f"dutyfree-test-{uuid.uuid4().hex[:8]}"
    ours = {"-v dutyfree:": f"-v {name}:", "--name dutyfree ": f"--name {name} ", "dutyfree-server": built}
    ours["-p 7800:7800"] = "-p 127.0.0.1::7800"
    program = block("docker run --rm")
    for theirs, other in ours.items():
        program = program.replace(theirs, other)
    create, run = program.split("\n", 1)
    try:
        token = shell(create, check=True).stdout.strip()
        shell(run, check=True)
        address = shell(f"docker port {name} 7800", check=True).stdout.splitlines()[0]
        call = f'curl -sf -H "Authorization: Bearer {token}" http://{address}'
        assert eventually(lambda: shell(f"{call}/readyz").returncode == 0), shell(f"docker logs {name}")
        made = shell(f'{call}/v1/sandboxes -d \'{{"limits": {{"memory": 67108864}}}}\'').stdout
        path = f"{call}/v1/sandboxes/{json.loads(made)['id']}"
        seen = shell(f'{path}/exec -d \'{{"command": "echo here; head -c 200M /dev/zero | tail"}}\'')
        answer = json.loads(seen.stdout)
        assert (answer["stdout"], answer["oom"]) == ("here\n", True), answer
        begin = time.monotonic()
        shell(f"docker stop -t 60 {name}", check=True)
        assert time.monotonic() - begin < 50  # by SIGINT, which ends the sandboxes
        assert shell(f"docker inspect -f '{{{{.State.ExitCode}}}}' {name}").stdout == "130\n"
    finally:
        shell(f"docker rm -f -v {name}; docker volume rm {name}")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The image of the page, on the study's image."""
    from dutyfree import study_image

    if ran(["docker", "image", "inspect", study_image.REFERENCE]).returncode:
        pytest.skip(f"no image {study_image.REFERENCE}; to enable it: dutyfree study --plan smoke")
    python = ran(["docker", "run", "--rm", "--entrypoint", "python3", study_image.REFERENCE, "-V"]).stdout
    if f"{sys.version_info[0]}.{sys.version_info[1]}." not in python:
        pytest.skip(f"the study's image has {python}; to enable it: run the tests with that version")
    wheel, build = block("pip wheel").splitlines()
    context, name = tmp_path_factory.mktemp("context"), f"dutyfree-test-server-{uuid.uuid4().hex[:8]}"
    shutil.copy(ROOT / "Containerfile", context)
    assert wheel.endswith(" .")  # the clone
    wheel = f"{wheel[:-1]}{ROOT}".replace("pip wheel", f"{sys.executable} -m pip wheel -q")
    shell(wheel, cwd=context, check=True)
    build = build.replace("dutyfree-server", name).replace("python:3.12-slim", study_image.REFERENCE)
    shell(build, cwd=context, check=True)
    try:
        yield name
    finally:
        shell(f"docker rmi -f {name}")
