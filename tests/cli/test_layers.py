"""``dutyfree layer``: build on one machine, use on another; error messages."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from dutyfree.server.tokens import Tokens
from tests.processes import ran

pytestmark = [pytest.mark.native, pytest.mark.root("layers hold files of many owners")]

RECIPE = """
[[stages]]
kind = "setup"
commands = ["head -c 2000000 /dev/urandom > noise"]
[[stages]]
kind = "setup"
commands = ["sha256sum noise > sum"]
"""


class Cli:
    def __init__(self, root: Path) -> None:
        self.root = root

    def start(self, node: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "dutyfree", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.root,
            env={**os.environ, "DUTYFREE_CACHE": str(self.root / node), "COLUMNS": "200"},
        )

    def __call__(self, node: str, *arguments: str, status: int = 0) -> str:
        process = self.start(node, *arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == status, (out, err)
        assert "Traceback" not in err
        return out + err


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return Cli(tmp_path)


def test_build_here_use_there(cli: Cli) -> None:
    built, _, progress = cli("here", "layer", "build", "recipe.toml").partition("stage 1")
    assert built.count("took") == 2
    assert (
        progress == ", setup: head -c 2000000 /dev/urandom > noise\nstage 2, setup: sha256sum noise > sum\n"
    )
    rows = json.loads(cli("here", "layer", "ls", "--json"))
    assert [row["below"] for row in rows] == [0, 1]
    assert "sha256sum noise" in rows[1]["commands"][0]
    digits = rows[1]["key"].partition(":")[2][:12]
    assert digits in cli("here", "layer", "ls")
    told = cli("here", "layer", "export", digits, "--to", "one.tar")
    digest = told[told.index("(") + 1 : told.index(")")]
    cli("there", "layer", "import", "one.tar", "--digest", "sha256:" + "0" * 64, status=1)
    assert "2 layers" in cli("there", "layer", "import", "one.tar", "--digest", digest)
    assert "complete already" in cli("there", "layer", "import", "one.tar")
    assert cli("there", "layer", "build", "recipe.toml") == built  # with the times of who made it
    assert "2 layers" in cli("third", "layer", "import", str(cli.root / "here"), "recipe.toml")
    assert "removed stage:" in cli("third", "layer", "rm", "recipe.toml")
    assert "1 layer," in cli("third", "layer", "import", str(cli.root / "here"), "recipe.toml")


def test_layers_are_listed_as_a_tree(cli: Cli) -> None:
    other = RECIPE.replace('sum"', 'other"') + '[[stages]]\nkind = "setup"\ncommands = ["true"]\n'
    (cli.root / "other.toml").write_text(other)
    assert "there are no layers" in cli("here", "layer", "ls")
    for name in ("recipe.toml", "other.toml"):
        cli("here", "layer", "build", name)
    rows = json.loads(cli("here", "layer", "ls", "--json"))
    parents = {row["commands"][0]: row["parent"] for row in rows}
    first = next(row["key"] for row in rows if not row["parent"])
    assert parents["sha256sum noise > sum"] == parents["sha256sum noise > other"] == first
    assert not any(row["in_use"] for row in rows)
    head, image, *tree = cli("here", "layer", "ls").splitlines()
    assert head.split() == ["layer", "kind", "size", "took", "built", "used", "command"]
    assert image.startswith("host (")
    assert [line.rstrip().rpartition("  ")[2] for line in tree] == [
        "head -c 2000000 /dev/urandom > noise",
        "sha256sum noise > sum",
        "sha256sum noise > other",
        "true",
    ]
    assert [len(line) - len(line.lstrip("│├└─ ")) for line in tree] == [3, 6, 6, 9]
    assert tree[0].startswith("└─ ")
    assert tree[1].startswith("   ├─ ")
    assert tree[3].startswith("      └─ ")


def test_layers_in_use_are_listed_as_such(cli: Cli) -> None:
    cli("here", "layer", "build", "recipe.toml")
    process = cli.start("here", "run", "--recipe", "recipe.toml", "--", "sh", "-c", "echo up; cat")
    assert process.stdout is not None
    process.stdout.readline()
    assert all(row["in_use"] for row in json.loads(cli("here", "layer", "ls", "--json")))
    assert cli("here", "layer", "ls").count("in use") == 2
    process.communicate(timeout=300)
    assert "in use" not in cli("here", "layer", "ls")


def test_a_peer_is_asked_before_anything_is_built(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (cli.root / "recipe.toml").write_text(RECIPE.replace('"head', '"sleep 0.3; head'))
    built, _, _ = cli("here", "layer", "build", "recipe.toml").partition("stage 1")
    token = cli("here", "token", "create", "operator", "--state", "state").strip()
    server = cli.start("here", "serve", "--listen", "127.0.0.1:0", "--state", "state")
    monkeypatch.setenv("DUTYFREE_PEER_TOKEN", token)
    try:
        assert server.stdout is not None
        source = server.stdout.readline().partition("serving sandboxes at ")[2].partition(";")[0]
        option = f"peers=[{source!r}]"
        fetched = cli("there", "layer", "build", "recipe.toml", "--option", option)
        assert fetched == f"{built}2 layers fetched from {source}\n"  # with the times of who made it
        assert "2 layers" in cli("third", "layer", "import", source, "recipe.toml")
        sums = [next(cli.root.glob(f"{at}/layers/kept/*/*/tree/0/workspace/sum")) for at in ("here", "there")]
        assert sums[0].read_bytes() == sums[1].read_bytes()
        assert "there are no layers of" in cli("fourth", "layer", "import", source, "snapshot:none", status=2)
        monkeypatch.setenv("DUTYFREE_PEER_TOKEN", token + "x")
        assert "this token is not valid" in cli("fourth", "layer", "import", source, "recipe.toml", status=1)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(100) == 130
        server.communicate()
    complaint = cli("there", "layer", "build", "recipe.toml", "--option", "peers=['tcp://x']", status=2)
    assert "'tcp://x' is not a peer" in complaint


def test_where_a_token_for_peers_comes_from(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, complaint in (("", "there is no token in"), ("a\nb", "is not a token")):
        (cli.root / "token").write_text(content)
        monkeypatch.setenv("DUTYFREE_PEER_TOKEN_FILE", str(cli.root / "token"))
        assert complaint in cli("here", "layer", "import", "http://127.0.0.1:1", "recipe.toml", status=2)
    monkeypatch.setenv("DUTYFREE_PEER_TOKEN_FILE", str(cli.root / "absent"))
    assert "cannot be read" in cli("here", "layer", "import", "http://127.0.0.1:1", "recipe.toml", status=2)
    monkeypatch.setenv("DUTYFREE_PEER_TOKEN", "dutyfree_x")
    for source in ("http://node.invalid:7800", "http://node.invalid"):
        told = cli("here", "layer", "import", source, "recipe.toml", status=2)
        assert "is not encrypted" in told
    monkeypatch.setenv("DUTYFREE_INSECURE_REGISTRIES", "node.invalid:7800")
    told = cli("here", "layer", "import", "http://node.invalid:7800", "recipe.toml", status=1)
    assert "cannot be reached" in told


def test_one_token_for_several_servers(cli: Cli) -> None:
    secret = cli("here", "token", "create", "operator", "--state", "one").strip()
    (cli.root / "token").write_text(secret + "\n")
    assert cli("here", "token", "create", "fleet", "--from", "token", "--state", "two") == ""
    with Tokens(cli.root / "two/server.sqlite") as tokens:
        assert anyio.run(tokens.tenant, secret) == "fleet"
    for content, complaint in ((secret, "exists already"), ("short", "is not a token"), ("", "is empty")):
        (cli.root / "token").write_text(content)
        told = cli("here", "token", "create", "fleet", "--from", "token", "--state", "two", status=2)
        assert complaint in told
    assert "No such file" in cli("here", "token", "create", "x", "--from", "none", "--state", "two", status=2)


def test_an_archive_through_a_pipe(cli: Cli) -> None:
    cli("here", "layer", "build", "recipe.toml")
    export = f"DUTYFREE_CACHE=here {sys.executable} -m dutyfree layer export recipe.toml --to -"
    bring = f"DUTYFREE_CACHE=there {sys.executable} -m dutyfree layer import -"
    done = ran(["sh", "-c", f"{export} | {bring}"], cwd=cli.root)
    assert "2 layers" in done.stdout, done


def test_what_is_wrong_is_said(cli: Cli) -> None:
    assert "there are no layers of the recipe" in cli(
        "here", "layer", "export", "recipe.toml", "--to", "x.tar", status=2
    )
    assert "layer build" in cli("here", "layer", "export", "abcdef123", "--to", "x.tar", status=2)
    assert "there are no layers" in cli("here", "layer", "rm", "snapshot:absent", status=2)
    assert "there is no absent.tar" in cli("here", "layer", "import", "absent.tar", status=2)
    assert "not the address of a server" in cli("here", "layer", "import", "http://", "recipe.toml", status=2)
    assert "cannot be reached" in cli(
        "here", "layer", "import", "http://127.0.0.1:1", "recipe.toml", status=1
    )
    assert not list(cli.root.glob("x.tar*"))
    assert "recipe.toml is not an archive of layers" in cli(
        "here", "layer", "import", "recipe.toml", status=1
    )
    (cli.root / "empty.toml").write_text('image = "host"\n')
    for arguments in (("import", "http://127.0.0.1:1", "empty.toml"), ("rm", "empty.toml")):
        assert "without stages" in cli("here", "layer", *arguments, status=2)


def test_what_is_no_file_is_written_to_and_stays(cli: Cli) -> None:
    cli("here", "layer", "build", "recipe.toml")
    pipe = cli.root / "pipe"
    os.mkfifo(pipe)
    reader = cli.start("there", "layer", "import", "-")
    with subprocess.Popen(["cat", str(pipe)], stdout=reader.stdin):
        assert "written to pipe" in cli("here", "layer", "export", "recipe.toml", "--to", "pipe")
    out, err = reader.communicate(timeout=120)
    assert "2 layers" in out, err
    assert pipe.is_fifo()


def test_a_disk_without_room_is_told(cli: Cli) -> None:
    """Nothing of it is kept: what stands on a stage that is not there would be of no use either."""
    full = cli.root / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(full)], check=True)
    try:
        told = cli("full", "layer", "build", "recipe.toml", status=1)
        assert "No space left on device" in told
        assert told.count("not stored on disk: see docs/recipes.md") == 2
        assert json.loads(cli("full", "layer", "ls", "--json")) == []
    finally:
        subprocess.run(["umount", str(full)], check=True)


def test_the_help_teaches(cli: Cli) -> None:
    told = cli("here", "layer", "--help")
    for word in ("recipe.toml", "snapshot:NAME", "https://node-1:7800", "docs/layers.md"):
        assert word in told
    assert "https://HOST:PORT" in cli("here", "layer", "import", "--help")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_one_that_waits_can_be_stopped(cli: Cli, signum: int) -> None:
    """Its peer says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = "http://{}:{}".format(*silent.getsockname())
        process = cli.start("here", "layer", "import", source, "recipe.toml")
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(100)
            assert catches(process, signal.SIGHUP)
            process.send_signal(signum)
            assert process.wait(100) == 130
            process.communicate()


def catches(process: subprocess.Popen[str], signum: int) -> bool:
    """Whether it has come so far: from then on signals halt it."""
    assert process.poll() is None
    text = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = [int(line.split()[1], 16) for line in text.splitlines() if line.startswith("SigCgt")]
    return bool(caught >> (signum - 1) & 1)
