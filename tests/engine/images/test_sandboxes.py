"""Images in real sandboxes, on real overlays."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Recipe, Stage
from dutyfree.contract import Substrate
from dutyfree.contract.errors import CreateError
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.engine.store.records import StoredImage
from dutyfree.engine.store.store import Store
from tests.awaiting import enter
from tests.engine.images.composing import Image, busybox, directory, hard, layout, link, member, tar
from tests.processes import ran

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("cache")]


@pytest.fixture
async def fresh() -> AsyncIterator[Substrate]:
    async with dutyfree.open("native") as substrate:
        yield substrate


async def kept() -> list[StoredImage]:
    return await anyio.to_thread.run_sync(Store().images)


WHITEOUTS = (
    tar(
        directory("d", 0o750, uid=5, gid=6),
        member("d/gone", b"1"),
        member("d/kept", b"2"),
        directory("o"),
        member("o/below", b"3"),
        directory("o/sub"),
        member("o/sub/below", b"3"),
        directory("whole"),
        member("whole/file", b"4"),
        member("becomes-directory", b"5"),
        directory("becomes-file"),
        member("becomes-file/x", b"6"),
    ),
    tar(
        member("d/.wh.gone"),
        directory("o"),
        member("o/.wh..wh..opq"),
        member("o/above", b"7"),
        directory("o/sub"),
        member("o/sub/above", b"7"),
        member(".wh.whole"),
        directory("becomes-directory"),
        member("becomes-directory/y", b"8"),
        member("becomes-file", b"9"),
    ),
    tar(directory("whole"), member("whole/new", b"again")),
)
SEEN = [b"/becomes-directory/y", b"/becomes-file", b"/d/kept", b"/o/above", b"/o/sub/above", b"/whole/new"]
LIST = "find / -xdev -type f | grep -v -e ^/bin -e ^/etc -e ^/proc -e ^/dev | sort"


@pytest.mark.parametrize("repeated", [1, 8], ids=["stacked", "squashed"])
async def test_whiteouts_hide(fresh: Substrate, tmp_path: Path, repeated: int) -> None:
    fill = [tar(member(f"etc/fill{n}", b"x")) for n in range(3 * repeated - 3)]
    image = Image([busybox(), *WHITEOUTS, *fill])
    root = await anyio.to_thread.run_sync(layout, tmp_path / "layout", image)
    async with fresh.sandbox(Recipe(image=f"oci:{root}")) as sandbox:
        assert (await sandbox.exec(LIST)).stdout.split() == SEEN
        assert (await sandbox.exec("ls /o /o/sub; test -e /d/gone || echo none")).stdout.split() == [
            b"/o:", b"above", b"sub", b"/o/sub:", b"above", b"none",
        ]  # fmt: skip
        assert (await sandbox.exec("stat -c '%a %u %g' /d")).stdout == b"755 0 0\n"
        # A hidden directory can be created again. It is empty then.
        made = "mkdir -p /d/gone && ls /d/gone && rm -r /o && mkdir /o && ls /o && echo done"
        assert (await sandbox.exec(made)).stdout == b"done\n"
    mounted = (await kept())[0].mounted
    assert (len(mounted) == 1) == (repeated > 1)


async def test_whiteouts_with_nothing_below_them_are_not_listed(fresh: Substrate, tmp_path: Path) -> None:
    """Overlayfs alone would list them in a directory that is in one layer only, or is opaque."""
    layers = {
        "lone": [tar(directory("lone"), member("lone/.wh.gone"), member("lone/a", b"1"))],
        "opaque": [
            tar(directory("o"), member("o/x", b"1"), directory("o/sub"), member("o/sub/y", b"1")),
            tar(
                member("o/.wh.x"), directory("o"), member("o/.wh..wh..opq"),
                directory("o/sub"), member("o/sub/.wh.y"),
            ),
        ],
        "removed": [tar(directory("r")), tar(member(".wh.r")), tar(directory("r"), member("r/.wh.x"))],
    }  # fmt: skip
    for name, own in layers.items():
        root = layout(tmp_path / name, Image([busybox(), *own]))
        async with fresh.sandbox(Recipe(image=f"oci:{root}")) as sandbox:
            listed = (await sandbox.exec("ls -a /lone /o /o/sub /r 2>/dev/null")).stdout.split()
            assert not {b"gone", b"x", b"y"} & set(listed), name
            assert (await sandbox.exec("find / -xdev -name gone -o -xdev -name x")).ok, name
    bottom = layout(tmp_path / "bottom", Image([tar(member("d/.wh.x"), member("d/a", b"1")), busybox()]))
    async with fresh.sandbox(Recipe(image=f"oci:{bottom}")) as sandbox:
        assert (await sandbox.exec("ls /d")).stdout == b"a\n"


async def test_an_image_of_sixty_layers(fresh: Substrate, tmp_path: Path) -> None:
    layers = [busybox(), *[tar(member(f"n/{n}", b"%d" % n), member("last", b"%d" % n)) for n in range(60)]]
    root = layout(tmp_path / "layout", Image(layers, compression="zstd"))
    recipe = Recipe(image=str(root), stages=(Stage("setup", commands=("rm /n/7; echo new > /n/8",)),))
    async with fresh.sandbox(recipe) as sandbox:
        assert (
            await sandbox.exec("cat /last; ls /n | sort -n | wc -l; cat /n/8")
        ).stdout == b"59" + b"59\nnew\n"
    (image,) = await kept()
    assert len(image.layers) == 61
    assert len(image.mounted) == 1


async def test_the_image_says_how_its_programs_run(fresh: Substrate, tmp_path: Path) -> None:
    config = {
        "Env": ["PATH=/opt/bin:/bin", "WITH=a=b c", "EMPTY="],
        "User": "app",
        "WorkingDir": "/srv/deep/work",
        "Entrypoint": ["/bin/echo", "entry"],
        "Cmd": ["point"],
    }
    tool = member("opt/bin/tool", b"#!/bin/sh\necho tool\n", mode=0o755)
    image = Image([busybox(), tar(directory("srv", 0o701, uid=9), tool)], config)
    root = layout(tmp_path / "layout", image)
    async with fresh.sandbox(Recipe(image=f"oci:{root}")) as sandbox:
        assert sandbox.workdir == "/srv/deep/work"
        said = await sandbox.exec("tool; pwd; id -u; id -g; echo $WITH,$EMPTY,$HOME")
        assert said.stdout == b"tool\n/srv/deep/work\n1000\n1001\na=b c,,/home/app\n"
        assert (await sandbox.exec("stat -c '%a %u' /srv /srv/deep")).stdout == b"701 9\n755 0\n"
        other = await sandbox.exec(
            "pwd; id -u; id -g; echo $WITH", user="0:staff", cwd="..", env={"WITH": "1"}
        )
        assert other.stdout == b"/srv/deep\n0\n50\n1\n"
        assert (await sandbox.exec("id -u; id -g", user="1234:77")).stdout == b"1234\n77\n"
        assert b"no such user" in (await sandbox.exec("id", user="app:nobody-knows")).stderr
        await sandbox.write("relative", b"1")
        assert (await sandbox.exec("cat relative")).stdout == b"1"
        assert await sandbox.read("/srv/deep/work/relative") == b"1"
        assert isinstance(sandbox, NativeSandbox)
        assert (await sandbox.exec(sandbox.program)).stdout == b"entry point\n"
    more = Recipe(image=f"oci:{root}", env={"EMPTY": "no", "MORE": "yes"}, path=("bin", "/own"))
    async with fresh.sandbox(more) as sandbox:
        said = await sandbox.exec("echo $PATH $WITH,$EMPTY,$MORE,$HOME; id -u; pwd")
        path = b"/srv/deep/work/bin:/own:/opt/bin:/bin"
        assert said.stdout == path + b" a=b c,no,yes,/home/app\n1000\n/srv/deep/work\n"


async def test_the_accounts_of_the_image_are_its_own(fresh: Substrate, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        layer = tmp_path / "root"
        layer.mkdir()
        with tarfile.open(fileobj=io.BytesIO(busybox())) as tools:
            tools.extraction_filter = lambda member, _: member
            tools.extractall(layer)
        (layer / "etc").chmod(0o711)
        archive.add(layer, ".")
    for name in (layer, tmp_path / "image.tar"):
        async with fresh.sandbox(Recipe(image=str(name))) as sandbox:
            assert b"app:x:1000" in (await sandbox.exec("cat /etc/passwd")).stdout
            assert b"staff" in (await sandbox.exec("cat /etc/group")).stdout
            assert b"sandbox" in (await sandbox.exec("cat /etc/hosts")).stdout
            assert (await sandbox.exec("stat -c %a /etc")).stdout == b"711\n"
            assert (await sandbox.exec("id -u", user="app")).stdout == b"1000\n"


async def test_links_of_the_image_in_our_places(fresh: Substrate, tmp_path: Path) -> None:
    """Links at /etc, or in it, do not lead out of the image."""
    outside = tmp_path / "outside"
    outside.mkdir()
    hostile = [
        tar(link("etc/hosts", f"{outside}/hosts"), link("etc/resolv.conf", f"../../../..{outside}/hosts")),
        tar(member(".wh.etc"), link("etc", str(outside))),
    ]
    for number, layer in enumerate(hostile):
        root = layout(tmp_path / str(number), Image([busybox(), layer], {"WorkingDir": "/etc/../etc/work"}))
        async with fresh.sandbox(Recipe(image=f"oci:{root}")) as sandbox:
            assert (await sandbox.exec("true", cwd="/")).ok
    assert await anyio.to_thread.run_sync(os.listdir, outside) == []


async def test_what_is_used_is_seen_to_be_on_the_disk(fresh: Substrate, tmp_path: Path, cache: Path) -> None:
    root = layout(tmp_path / "layout", Image([busybox(), tar(member("f", b"1"))]))

    def settled() -> int:
        return len(list(cache.glob("layers/kept/*/*/settled")))

    async with fresh.sandbox(Recipe(image=f"oci:{root}")):
        with anyio.fail_after(60):
            while await anyio.to_thread.run_sync(settled) < 2:  # noqa: ASYNC110 (files tell nobody)
                await anyio.sleep(0.02)


async def test_layers_in_use_are_not_collected(fresh: Substrate, tmp_path: Path) -> None:
    root = layout(tmp_path / "layout", Image([busybox(), tar(member("f", b"1"))]))
    async with fresh.sandbox(Recipe(image=f"oci:{root}")) as sandbox:
        store = Store()
        assert await anyio.to_thread.run_sync(store.remove_image, f"oci:{root}")
        done = await anyio.to_thread.run_sync(store.collect)
        assert (done.layers, done.in_use) == (0, 2)
        assert (await sandbox.exec("cat /f")).stdout == b"1"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/directory", "no image at"),
        ("Not A Name", "not an image reference"),
        ("127.0.0.1:1/x", "cannot be reached"),
        pytest.param("docker-daemon:dutyfree/none", "no image", marks=pytest.mark.docker),
    ],
)
async def test_an_unknown_image_is_told(fresh: Substrate, name: str, words: str) -> None:
    with pytest.raises(CreateError, match=words):
        await enter(fresh.sandbox(Recipe(image=name)))


FIELDS = (
    "find / -xdev ! -path '/proc*' ! -path '/dev*' ! -path '/sys*' -exec stat -c '%n|%F|%a|%u|%g|%N|%s' {} +"
)
OURS = {"/", "/.dockerenv", "/workspace", "/tmp", "/proc", "/dev", "/sys"}
PLACES = {f"/etc/{name}" for name in ("hosts", "hostname", "resolv.conf", "mtab")}


@pytest.mark.docker
async def test_the_same_files_as_under_docker(fresh: Substrate, tmp_path: Path) -> None:
    """An image that Docker built: names, types, modes, owners, sizes and link targets are the same."""
    context = tmp_path / "context"
    context.mkdir()
    odd = tar(
        directory("odd", 0o1777, uid=33, gid=44),
        member("odd/set", b"1", mode=0o6755),
        hard("odd/hard", "odd/set"),
        link("odd/absolute", "/nowhere"),
        link("odd/up", "../../.."),
        member("odd/pipe", type=tarfile.FIFOTYPE, mode=0o600, uid=65534),
        member("odd/n\xe4me with space", b"", mode=0o000),
    )
    (context / "base.tar").write_bytes(busybox())
    (context / "odd.tar").write_bytes(odd)
    (context / "Dockerfile").write_text(
        f"FROM scratch\nLABEL run={os.getpid()}\nADD base.tar /\nADD odd.tar /\n"
        "RUN [\"/bin/rm\", \"/bin/pwd\"]\nRUN [\"/bin/mkdir\", \"-p\", \"/made/deep\"]\n"
        "RUN [\"/bin/rm\", \"-r\", \"/made\"]\nWORKDIR /odd\nUSER app\nENV A=1\n"
    )  # fmt: skip
    # The Docker engine may be shared: use a name and build steps that no one else has.
    name = f"dutyfree/test-same-{os.getpid()}:latest"

    def docker(*arguments: str) -> str:
        environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
        done = ran(["docker", *arguments], env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    await anyio.to_thread.run_sync(docker, "build", "-q", "--network", "none", "-t", name, str(context))
    try:
        theirs = await anyio.to_thread.run_sync(
            docker, "run", "--rm", "-u", "0", "--network", "none", name, "sh", "-c", FIELDS
        )
        async with fresh.sandbox(Recipe(image=f"docker-daemon:{name}")) as sandbox:
            ours = (await sandbox.exec(FIELDS, user="0")).stdout.decode()
            assert (await sandbox.exec(["pwd"])).exit_code == 127  # removed by a whiteout
            assert (await sandbox.exec("echo $A $PWD; id -u")).stdout == b"1 /odd\n1000\n"
    finally:
        await anyio.to_thread.run_sync(docker, "rmi", "-f", name)

    def comparable(text: str) -> list[str]:
        lines = [line for line in text.splitlines() if line.split("|")[0] not in OURS | PLACES]
        # Sizes of directories depend on the file system.
        return sorted(line.rpartition("|")[0] if "|directory|" in line else line for line in lines)

    assert len(comparable(ours)) > 20
    assert comparable(ours) == comparable(theirs)
