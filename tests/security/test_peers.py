"""Hostile peers."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import anyio
import pytest

import dutyfree
from dutyfree import Recipe, Stage, layers
from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import find
from dutyfree.engine.store.store import Store
from tests.engine.images.composing import Image, busybox, layout
from tests.opening import open_native

pytestmark = [pytest.mark.native, pytest.mark.root("layers hold files of many owners")]

WANTED, OTHER = (Recipe(stages=(Stage("setup", (f"echo {name} > file",)),)) for name in ("wanted", "other"))

CHANGED = """
import os, re, subprocess, sys, threading
CHANGES = {b"carried:1": b"trusted:2"}
if "short" in sys.argv: CHANGES[b'"bytes":[0-9]+'] = b'"bytes":0'
serving = subprocess.Popen([sys.executable, "-m", "dutyfree", "layer", "serve"], stdin=-1, stdout=-1)
def back():
    while data := serving.stdout.read1(65536):
        for before, after in CHANGES.items(): data = re.sub(before, after, data)
        if "short" in sys.argv and b'"bytes":0' in data: data = data[: data.index(b"\\n") + 1]
        sys.stdout.buffer.write(data); sys.stdout.buffer.flush()
        while b'"bytes":0' in data and serving.stdout.read1(65536): pass
threading.Thread(target=back).start()
for line in sys.stdin.buffer:
    if b'"offer"' in line: line = sys.argv[1].encode() + b"\\n"
    serving.stdin.write(line); serving.stdin.flush()
serving.stdin.close()
"""


async def _take(recipe: Recipe, name: str) -> None:
    async with open_native() as native, native.sandbox(recipe) as sandbox:
        await sandbox.snapshot(name)


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A source to import from, which delivers other layers than requested."""
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "there"))
    anyio.run(_take, WANTED, "wanted")
    anyio.run(_take, OTHER, "other")
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "here"))
    program = tmp_path / "peer.py"
    program.write_text(CHANGED)

    def giving(*names: str, how: str = "") -> str:
        question = json.dumps({"offer": names}, separators=(",", ":"))
        there = f"env DUTYFREE_CACHE={tmp_path / 'there'}"
        return f"exec:{there} {sys.executable} {program} '{question}' {how}"

    return giving


def test_what_was_not_asked_for_is_not_taken(hostile: Any) -> None:
    honest = f"recipe:{WANTED.key(1)}"
    for given in (f"recipe:{OTHER.key(1)}", "snapshot:other", "snapshot:wanted"):
        with pytest.raises(CreateError, match="not asked for"):
            layers.bring(hostile(honest, given), [WANTED])
    with pytest.raises(CreateError, match="not asked for"):
        layers.bring(hostile("snapshot:other"), ["snapshot:wanted"])
    assert layers.ls() == []
    layers.bring(hostile(honest), [WANTED])
    assert [kept.recipe for kept in layers.ls()] == [WANTED.key(1)]
    layers.bring(hostile("snapshot:wanted"), ["snapshot:wanted"])
    assert {kept.name for kept in layers.ls()} >= {"snapshot:wanted"}


LONG = Recipe(stages=(Stage("setup", ("sleep 0.3; date +%N > file",)),))


def test_nor_by_a_node_that_asks_by_itself(
    hostile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The layer is built instead, and the peer's message cannot control a terminal."""
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "there"))
    anyio.run(_take, LONG, "long")
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "here"))
    orders = 'exec:printf \'{"error":"\\\\u001b[2J"}\\n\''
    peers = [hostile(f"recipe:{OTHER.key(1)}"), hostile("snapshot:long"), orders]

    async def ask() -> tuple[str, list[int], bytes]:
        async with open_native(peers=peers) as native, native.sandbox(LONG) as sandbox:
            brought = [figures.layers for figures in native.peers.values()]
            return sandbox.served.kind, brought, await sandbox.read("file")

    assert anyio.run(ask)[:2] == ("cold", [0, 0, 0])
    assert [kept.recipe for kept in layers.ls()] == [LONG.key(1)]
    (told,) = [record.getMessage() for record in caplog.records if "exec:printf" in record.getMessage()]
    assert "[2J" in told
    assert "\x1b" not in told


def test_images_do_not_come_under_names_of_others(
    tmp_path: Path, hostile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that delivers layers on an image cannot give the image another name."""
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "there"))
    layout(tmp_path / "layout", Image([busybox()], {}))
    anyio.run(find.import_image, f"oci:{tmp_path / 'layout'}", "carried:1")
    upon = Recipe("carried:1", WANTED.stages)
    anyio.run(_take, upon, "upon")
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "here"))
    with pytest.raises(CreateError, match="not asked for"):
        layers.bring(hostile(f"recipe:{upon.key(1)}"), [upon])
    layers.bring(hostile("snapshot:upon"), ["snapshot:upon"])
    assert Store().images() == []

    async def used() -> bytes:
        async with dutyfree.open("native") as native, native.sandbox(Recipe("snapshot:upon")) as sandbox:
            return await sandbox.read("file")

    assert anyio.run(used) == b"wanted\n"


def test_a_peer_that_announces_less_is_not_waited_for(hostile: Any) -> None:
    with pytest.raises(CreateError, match="cut after 0 of"):
        layers.bring(hostile(f"recipe:{WANTED.key(1)}", how="short"), [WANTED])
    assert layers.ls() == []


def test_an_answer_that_is_nested_without_end(hostile: Any) -> None:
    say = (
        'import sys; sys.stdin.readline(); print("{\\"x\\":" + "[" * 100000 + "]" * 100000 + "}", flush=True)'
    )
    with pytest.raises(CreateError, match="is not a `dutyfree layer serve`"):
        layers.bring(f"exec:{sys.executable} -c '{say}'", [WANTED])


@pytest.mark.parametrize("name", ["index.json", "manifest.json"])
def test_documents_that_are_nested_without_end(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "here"))
    document = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with tarfile.open(tmp_path / "hostile.tar", "w") as archive:
        for member, data in ((name, document), ("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')):
            entry = tarfile.TarInfo(member)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    with pytest.raises(CreateError):
        layers.bring(tmp_path / "hostile.tar")
    with pytest.raises(CreateError):
        anyio.run(find.import_image, str(tmp_path / "hostile.tar"))
