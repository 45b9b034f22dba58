"""Directory trees: upload and download."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio.to_thread

from dutyfree.conformance import expect
from dutyfree.conformance.suite import in_sandbox
from dutyfree.contract import Sandbox
from dutyfree.contract.errors import ActionError


@asynccontextmanager
async def local_directory() -> AsyncIterator[Path]:
    """A temporary directory on this host."""
    path = Path(await anyio.to_thread.run_sync(tempfile.mkdtemp, "", "dutyfree-conformance-"))
    try:
        yield path
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(shutil.rmtree, path)


def plant(root: Path) -> None:
    """Make a tree with every kind of entry."""
    (root / "empty").mkdir(parents=True)
    (root / "deep" / "er").mkdir(parents=True)
    (root / "deep" / "er" / "file").write_bytes(b"deep")
    (root / "script").write_bytes(b"#!/bin/sh\necho ran\n")
    (root / "script").chmod(0o755)
    (root / "private").write_bytes(bytes(range(256)))
    (root / "private").chmod(0o600)
    (root / "ünï →\nline").write_bytes(b"unicode")
    (root / "-dash 'quoted'").write_bytes(b"")
    (root / "big").write_bytes(b"0123456789" * 200_000)
    (root / "twin").hardlink_to(root / "deep" / "er" / "file")
    (root / "link").symlink_to("deep/er/file")
    (root / "up").symlink_to("../../../..")
    (root / "absolute").symlink_to("/etc")
    (root / "dangling").symlink_to("nowhere")
    (root / "sealed").mkdir()
    (root / "sealed" / "file").write_bytes(b"")
    (root / "sealed").chmod(0o750)
    for path in root.rglob("*"):
        if not path.is_symlink() and path.name not in ("script", "private", "sealed"):
            path.chmod(0o755 if path.is_dir() else 0o644)


def portrait(root: Path) -> dict[str, tuple[str, object]]:
    """Everything in a tree that a copy must keep."""
    seen: dict[str, tuple[str, object]] = {}
    for path in root.rglob("*"):
        name, mode = str(path.relative_to(root)), path.lstat().st_mode
        if path.is_symlink():
            seen[name] = ("link", os.readlink(path))
        elif path.is_dir():
            seen[name] = (f"directory {stat.S_IMODE(mode):o}", None)
        else:
            seen[name] = (f"file {stat.S_IMODE(mode):o}", path.read_bytes())
    return seen


@in_sandbox()
async def tree_round_trip(sandbox: Sandbox) -> None:
    """A tree comes back the same: contents (of hard links too), modes, links, empty directories, names."""
    async with local_directory() as local:
        await anyio.to_thread.run_sync(plant, local / "sent")
        await sandbox.upload(local / "sent", "made/on/the/way/tree")
        await sandbox.download("made/on/the/way/tree", local / "back", outside_links=True)
        sent = await anyio.to_thread.run_sync(portrait, local / "sent")
        back = await anyio.to_thread.run_sync(portrait, local / "back")
        expect.equal(sorted(back), sorted(sent), "names in the tree")
        for name, wanted in sent.items():
            expect.equal(back[name], wanted, f"{name!r} in the tree")
    kinds = {entry.name: entry.kind for entry in await sandbox.list("made/on/the/way/tree")}
    expect.equal(
        [kinds[name] for name in ("link", "absolute", "empty", "big")],
        ["link", "link", "directory", "file"],
        "kinds",
    )


@in_sandbox("commands")
async def uploaded_tree_is_usable(sandbox: Sandbox) -> None:
    """Commands can use an uploaded tree: run scripts, follow links, change files."""
    async with local_directory() as local:
        await anyio.to_thread.run_sync(plant, local / "sent")
        await sandbox.upload(local / "sent", "tree")
    seen = await sandbox.exec(
        "./script && cat link && rmdir empty && echo x >> private && rm -r sealed", cwd="tree"
    )
    expect.equal((seen.exit_code, seen.stdout), (0, b"ran\ndeep"), "commands on the tree")


@in_sandbox()
async def file_round_trip(sandbox: Sandbox) -> None:
    """A single file is copied to exactly the given path, with its mode."""
    async with local_directory() as local:
        sent, back = local / "sent", local / "back"
        await anyio.to_thread.run_sync(sent.write_bytes, b"content")
        await anyio.to_thread.run_sync(sent.chmod, 0o750)
        await sandbox.upload(sent, "parent/other name")
        expect.equal(await sandbox.read("parent/other name"), b"content", "content")
        await sandbox.download("parent/other name", back)
        expect.equal(await anyio.to_thread.run_sync(back.read_bytes), b"content", "content of the copy")
        mode = stat.S_IMODE((await anyio.to_thread.run_sync(back.stat)).st_mode)
        expect.equal(mode, 0o750, "mode of the copy")


@in_sandbox()
async def missing_sources(sandbox: Sandbox) -> None:
    """A missing source raises FileNotFoundError, in both directions, and nothing is made."""
    async with local_directory() as local:
        with expect.raises(FileNotFoundError, "upload of a missing file"):
            await sandbox.upload(local / "missing", "target")
        with expect.raises(FileNotFoundError, "download of a missing file"):
            await sandbox.download("missing", local / "target")
        with expect.raises(FileNotFoundError, "read of what was never uploaded"):
            await sandbox.read("target")
        left = await anyio.to_thread.run_sync(os.listdir, local)
        expect.equal(left, [], "what a failed download left")


@in_sandbox()
async def link_round_trip(sandbox: Sandbox) -> None:
    """A source that is a link stays a link, in both directions, with any target."""
    async with local_directory() as local:
        await anyio.to_thread.run_sync(plant, local / "tree")
        for name in ("link", "absolute", "dangling"):
            await sandbox.upload(local / "tree" / name, f"up/{name}")
            await sandbox.download(f"up/{name}", local / name, outside_links=True)
            sent = await anyio.to_thread.run_sync(os.readlink, local / "tree" / name)
            back = await anyio.to_thread.run_sync(os.readlink, local / name)
            expect.equal(back, sent, f"where {name!r} leads")
        kinds = [entry.kind for entry in await sandbox.list("up")]
        expect.equal(kinds, ["link"] * 3, "kinds of the uploaded links")


@in_sandbox("commands")
async def download_stays_inside(sandbox: Sandbox) -> None:
    """A download copies links as links, and never writes through one, also not in a later download."""
    async with local_directory() as local:
        outside, target = local / "outside", local / "target"
        await anyio.to_thread.run_sync(outside.mkdir, 0o700)
        await anyio.to_thread.run_sync((local / "kept").write_bytes, b"kept")

        async def is_whole(what: str) -> None:
            names = await anyio.to_thread.run_sync(os.listdir, local)
            expect.equal(sorted(names), ["kept", "outside", "target"], f"names beside the target, {what}")
            expect.equal(await anyio.to_thread.run_sync(os.listdir, outside), [], f"names outside, {what}")
            kept = await anyio.to_thread.run_sync((local / "kept").read_bytes)
            expect.equal(kept, b"kept", f"a file outside, {what}")
            mode = stat.S_IMODE((await anyio.to_thread.run_sync(outside.stat)).st_mode)
            expect.equal(mode, 0o700, f"mode of a directory outside, {what}")

        seen = await sandbox.exec(
            "mkdir tree && ln -s ../outside tree/escape && ln -s ../kept tree/file && ln -s ../kept tree/hard"
            " && ln -s ../none tree/none && ln -s / tree/root && echo x > 'tree/..x' && ln -s outside top"
        )
        expect.succeeded(seen, "making links")
        await sandbox.download("tree", target, outside_links=True)
        await is_whole("after links")
        seen = await sandbox.exec(
            "cd tree && rm escape file hard none && mkdir escape && chmod 777 escape"
            " && for name in escape/file file none; do echo evil > $name; done && ln file hard"
        )
        expect.succeeded(seen, "replacing links")
        with suppress(OSError, ValueError):  # refusing is as good as replacing the link
            await sandbox.download("tree", target)
        await is_whole("after files in their place")
        await anyio.to_thread.run_sync(shutil.rmtree, target)
        await sandbox.download("top", target, outside_links=True)
        with suppress(OSError, ValueError):
            await sandbox.download("tree", target)
        await is_whole("after a link as the target")


@in_sandbox("commands")
async def links_that_lead_outside(sandbox: Sandbox) -> None:
    """A download leaves out links that point out of the tree, and names them: they would show host files."""
    async with local_directory() as local:
        secret, target = local / "secret", local / "target"
        await anyio.to_thread.run_sync(secret.write_bytes, b"secret")
        outside = {
            "absolute": str(secret),
            "up": "../secret",
            "deep/up": "../../secret",
            "through": "deep/inside/../../secret",
            "round": "./deep//../../secret",
            "above": "..",
        }
        inside = {"deep/inside": "..", "file": "deep/file", "deep/self": "../file", "dangling": "deep/none"}
        made = "".join(f"ln -s '{to}' 'tree/{name}'; " for name, to in {**outside, **inside}.items())
        seen = await sandbox.exec(
            f"set -e; mkdir -p tree/deep; echo content > tree/deep/file; {made} ln -s '{secret}' top"
        )
        expect.succeeded(seen, "making links")
        left = await sandbox.download("tree", target)
        expect.equal(sorted(left), sorted(outside), "links that were left out")
        back = await anyio.to_thread.run_sync(portrait, target)
        expect.equal(sorted(back), sorted([*inside, "deep", "deep/file"]), "names in the copy")
        content = await anyio.to_thread.run_sync((target / "deep" / "self").read_bytes)
        expect.equal(content, b"content\n", "a file through two links")
        with expect.raises(ActionError, "download of a link that leads outside"):
            await sandbox.download("top", local / "top")
        names = await anyio.to_thread.run_sync(os.listdir, local)
        expect.equal(sorted(names), ["secret", "target"], "names beside the target")


@in_sandbox("commands")
async def downloads_are_never_set_id(sandbox: Sandbox) -> None:
    """A downloaded file is never set-user-id or set-group-id."""
    async with local_directory() as local:
        expect.succeeded(await sandbox.exec("mkdir d; : > d/f; chmod 6755 d/f; cp -p d/f f"), "making files")
        await sandbox.download("d", local / "d")
        await sandbox.download("f", local / "f")
        for path in (local / "d" / "f", local / "f"):
            mode = stat.S_IMODE((await anyio.to_thread.run_sync(path.stat)).st_mode)
            expect.equal(mode, 0o755, f"mode of {path.name!r}")
