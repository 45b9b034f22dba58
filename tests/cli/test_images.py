"""``dutyfree image`` with a real registry."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.counts import arrives
from tests.engine.images import composing
from tests.engine.images.composing import Image, busybox, layout, member, push, tar
from tests.engine.images.test_registry import Cutter
from tests.processes import eventually

pytestmark = pytest.mark.root("layers hold files of many owners")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with composing.registry(tmp_path_factory.mktemp("registry")) as address:
        yield address


class Cli:
    def __init__(self, root: Path) -> None:
        self.layers = root / "cache/layers"
        self.environment = {
            **os.environ,
            "DUTYFREE_CACHE": str(root / "cache"),
            "DOCKER_CONFIG": str(root),
            "COLUMNS": "200",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "dutyfree", "image", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )

    def __call__(self, *arguments: str, status: int = 0) -> str:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == status, (out, err)
        return out if status == 0 else err


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def test_pull_list_remove(host: str, cli: Cli) -> None:
    shared = tar(member("shared", os.urandom(50_000)))
    digest = push(host, "a", "1", Image([shared, tar(member("one", b"1"))]))
    push(host, "b", "latest", Image([shared, tar(member("two", b"2"))]))
    assert cli("pull", "--quiet", f"{host}/a:1").strip() == digest
    assert "2 layers" in cli("pull", f"{host}/b")
    rows = json.loads(cli("ls", "--json"))
    assert [row["name"] for row in rows] == [f"{host}/a:1", f"{host}/b:latest"]
    assert rows[0]["used"] > 0
    listed = cli("ls")
    assert digest[7:19] in listed
    assert "2024-02-03" in listed
    assert "removed 1 layer," in cli("rm", f"{host}/a:1")
    assert "removed 0 layers" in cli("rm", "--keep-layers", f"{host}/b") + cli("gc", "--spare", "1G")
    assert "removed 2 layers" in cli("gc")
    assert "image ls" in cli("rm", f"{host}/b", status=2)


def test_a_mirror_is_asked_first(host: str, cli: Cli) -> None:
    push(host, "mirrored", "latest", Image([tar(member("one", b"1"))]))
    said = cli("pull", "--mirror", f"http://{host}", "registry.example/mirrored")
    assert said.startswith("registry.example/mirrored:latest")


def test_failures_say_what_to_do(host: str, cli: Cli) -> None:
    assert "check the name and the tag" in cli("pull", f"{host}/none", status=1)
    assert "as Docker does" in cli("pull", "Not//Good", status=1)
    assert "no image at" in cli("import", "/no/such/tar", status=1)


def test_import(cli: Cli, tmp_path: Path) -> None:
    root = layout(tmp_path / "layout", Image([busybox(), tar(member("one", b"1"))]))
    assert "2 layers" in cli("import", f"oci:{root}", "from-layout:2")
    (tmp_path / "oci.tar").write_bytes(b"")
    subprocess.run(["tar", "-C", root, "-cf", tmp_path / "oci.tar", "."], check=True)
    assert "2 layers" in cli("import", str(tmp_path / "oci.tar"), "from-tar")
    subprocess.run(["gzip", tmp_path / "oci.tar"], check=True)
    assert "2 layers" in cli("import", str(tmp_path / "oci.tar.gz"))
    (tmp_path / "root.tar").write_bytes(busybox())
    assert "1 layer," in cli("import", str(tmp_path / "root.tar"), "rootfs")
    (tmp_path / "root").mkdir()
    subprocess.run(["tar", "-C", tmp_path / "root", "-xf", tmp_path / "root.tar"], check=True)
    assert "1 layer," in cli("import", str(tmp_path / "root"), "directory:x")
    names = [row["name"] for row in json.loads(cli("ls", "--json"))]
    assert names == [
        str(tmp_path / "oci.tar.gz"),
        "docker.io/library/directory:x",
        "docker.io/library/from-layout:2",
        "docker.io/library/from-tar:latest",
        "docker.io/library/rootfs:latest",
    ]
    # Two of the image, one of the tar, one of the directory: the same layers are kept once.
    assert len(list(cli.layers.glob("kept/*/*"))) == 4


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_pull_cleans_up(host: str, cli: Cli, signum: int) -> None:
    push(host, "large", "latest", Image([tar(member("large", os.urandom(20_000_000)))]))
    # No connection brings more than a part: the pull is always under way when the signal comes.
    with contextlib.closing(Cutter(host, 1_000_000)) as cutter:
        process = cli.start("pull", f"{cutter.host}/large")
        assert eventually(lambda: arrives(cli.layers) or process.poll() is not None)
        assert process.poll() is None
        process.send_signal(signum)
        _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert [path.name for path in (cli.layers / "making").iterdir()] == [".lock"]
    assert not list(cli.layers.glob("kept/*/*"))
    assert "1 layer," in cli("pull", f"{host}/large")


def test_run_without_a_command_runs_what_the_image_says(cli: Cli, tmp_path: Path) -> None:
    config = {"Entrypoint": ["/bin/echo", "entry"], "Cmd": ["point"]}
    root = layout(tmp_path / "layout", Image([busybox()], config))

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "dutyfree", "run", "--image", *arguments]
        return subprocess.run(command, capture_output=True, env=cli.environment, check=False, timeout=300)

    assert run(f"oci:{root}").stdout == b"entry point\n"
    assert run(f"oci:{root}", "--", "echo", "own").stdout == b"own\n"
    silent = run(f"oci:{layout(tmp_path / 'silent', Image([busybox()]))}")
    assert (silent.returncode, b"the image names none" in silent.stderr) == (2, True)


def test_gc_tells_before_it_removes(host: str, cli: Cli) -> None:
    push(host, "gone", "latest", Image([tar(member("one", os.urandom(100_000)))]))
    cli("pull", f"{host}/gone")
    cli("rm", "--keep-layers", f"{host}/gone")
    half = cli.layers / "making/killed"
    half.mkdir()
    (half / "file").write_bytes(bytes(50_000))
    assert cli("gc", "--dry-run").startswith("would remove 1 layer,")
    assert half.exists()
    assert list(cli.layers.glob("locks/*"))
    said = cli("gc")
    assert said.startswith("removed 1 layer,")
    assert "KiB unfinished" in said
    assert not half.exists()
    assert not list(cli.layers.glob("locks/*"))
