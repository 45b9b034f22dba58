"""Untrusted exports: broken and hostile ones are refused, and leave nothing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dutyfree import layers
from dutyfree.contract.errors import CreateError, DutyfreeError
from dutyfree.engine.exchange import layout
from dutyfree.engine.exchange.chains import Blob, ChainLayer, LayerChain
from dutyfree.engine.images import rootfs
from dutyfree.engine.images.streams import zstd
from dutyfree.engine.launcher.protocol import LAYERS_MAX
from dutyfree.engine.store.provenance import Provenance
from dutyfree.engine.store.records import ImageSettings
from dutyfree.engine.store.store import Store
from tests.engine.images.composing import directory, hard, link, member, tar

pytestmark = [pytest.mark.usefixtures("cache"), pytest.mark.root("layers hold files of many owners")]

KEY = "stage:" + "a" * 64


def blob(root: Path, data: bytes, *, packed: bytes | None = None, **lies: Any) -> Blob:
    """Write a blob to a directory. Returns its description, with lies if given."""
    packed = zstd().compress(data) if packed is None else packed
    digest = hashlib.sha256(packed).hexdigest()
    root.mkdir(exist_ok=True)
    (root / digest).write_bytes(packed)
    honest = Blob(f"sha256:{digest}", len(packed), f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
    return msgspec.structs.replace(honest, **lies)


def made(**lies: Any) -> Provenance:
    told = {"kind": "setup", "seconds": 1.0, "image": "host", "identity": rootfs.host_identity()}
    return Provenance(**{**told, **lies})


def archive(root: Path, chain: LayerChain, edit: Callable[[dict[str, bytes]], None] = lambda _: None) -> Path:
    """An export of a chain with the blobs of a directory. Its documents have correct digests."""
    config, found = layout.chain_documents(chain)
    manifests = [{**found.descriptor, "annotations": {"org.opencontainers.image.ref.name": chain.name}}]
    files = {"index.json": layout.index(manifests)}
    for document in (config, found):
        files[f"blobs/sha256/{document.descriptor['digest'][7:]}"] = document.data
    for path in (root / "blobs").iterdir():
        files[f"blobs/sha256/{path.name}"] = path.read_bytes()
    edit(files)
    with tarfile.open(root / "export.tar", "w") as out:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            out.addfile(entry, io.BytesIO(data))
    return root / "export.tar"


def chain(*layers: ChainLayer, **lies: Any) -> LayerChain:
    told = {"name": KEY, "image": "host", "identity": rootfs.host_identity(), "layers": layers}
    return LayerChain(**{**told, **lies})


def whole(root: Path, *members: Any, **lies: Any) -> LayerChain:
    """A chain of one layer, with as many file systems as this machine needs."""
    first = blob(root / "blobs", tar(*members), **lies)
    others = [blob(root / "blobs", tar()) for _ in range(rootfs.host_trees() - 1)]
    return chain(ChainLayer(KEY, made(), (first, *others)))


def left(cache: Path) -> list[str]:
    names = [path.name for path in cache.glob("layers/kept/*/*")]
    return names + [path.name for path in cache.glob("layers/making/*") if path.name != ".lock"]


def test_an_honest_one_is_taken(tmp_path: Path, cache: Path) -> None:
    """The control: without a defect, the export is accepted."""
    members = (member("workspace/a", b"1"), directory("d"))
    (done,) = layers.bring(archive(tmp_path, whole(tmp_path, *members)))
    assert done.layers == 1
    assert (cache / f"layers/kept/stage/{'a' * 64}/tree/0/workspace/a").read_bytes() == b"1"


@pytest.mark.parametrize(
    "members",
    [
        [member("../../../../../../etc/out", b"out")],
        [link("way", "/etc"), member("way/../../out", b"out")],
        [hard("stolen", "/etc/shadow")],
        [hard("stolen", "../../../../../etc/shadow")],
        [member("a", b"1"), member("a/b", b"2")],
    ],
    ids=["up", "link", "hard", "hard-up", "file-as-directory"],
)
def test_names_that_lead_out_are_refused(tmp_path: Path, cache: Path, members: list[Any]) -> None:
    with pytest.raises(CreateError, match="refused"):
        layers.bring(archive(tmp_path, whole(tmp_path, *members)))
    assert left(cache) == []
    assert not Path("/etc/out").exists()


def test_links_are_not_written_through(tmp_path: Path, cache: Path) -> None:
    target = tmp_path / "victim"
    target.mkdir()
    members = [link("way", str(target)), member("way/file", b"x")]
    try:
        layers.bring(archive(tmp_path, whole(tmp_path, *members)))
    except CreateError:
        assert left(cache) == []
    assert list(target.iterdir()) == []


def test_marks_of_the_overlay_and_devices_do_not_arrive(tmp_path: Path, cache: Path) -> None:
    marked = directory("d", pax_headers={"SCHILY.xattr.trusted.overlay.redirect": "/root"})
    device = member("disk", type=tarfile.BLKTYPE, devmajor=8, devminor=0)
    layers.bring(archive(tmp_path, whole(tmp_path, marked, device)))
    tree = cache / f"layers/kept/stage/{'a' * 64}/tree/0"
    assert os.listxattr(tree / "d") == []
    assert not (tree / "disk").exists()


def test_bombs_are_bounded(tmp_path: Path, cache: Path) -> None:
    zeros = member("zeros", bytes(50_000_000))
    # It unpacks to more than it announces: unpacking stops there.
    with pytest.raises(CreateError, match="grows beyond 100000 bytes"):
        layers.bring(archive(tmp_path, whole(tmp_path, zeros, tar_size=100_000)))
    assert left(cache) == []
    # It announces its size: it is refused before the transfer if that is not allowed, or does not fit.
    with pytest.raises(CreateError, match="are allowed"):
        layers.bring(archive(tmp_path, whole(tmp_path, zeros)), largest=1_000_000)
    for lie in ("tar_size", "size"):
        with pytest.raises(CreateError, match="are free"):
            layers.bring(archive(tmp_path, whole(tmp_path, zeros, **{lie: 1 << 60})), largest=1 << 61)
    assert left(cache) == []
    assert list(cache.glob("layers/parts/*")) == []


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        ({"diff_id": "sha256:" + "0" * 64}, "its tar has the digest"),
        ({"digest": "sha256:" + "0" * 64}, "is missing"),
        ({"digest": "sha256:../../../../etc/passwd"}, "inconsistent"),
        ({"diff_id": "md5:1"}, "inconsistent"),
        ({"size": 10}, "does not match its digest"),
        ({"size": 10_000_000}, "cut after"),
        ({"size": -1}, "inconsistent"),
    ],
    ids=str,
)
def test_blobs_must_be_what_is_said(tmp_path: Path, cache: Path, lies: dict[str, Any], says: str) -> None:
    with pytest.raises(CreateError, match=says):
        layers.bring(archive(tmp_path, whole(tmp_path, member("a", os.urandom(1000)), **lies)))
    assert left(cache) == []


def test_what_is_no_compressed_tar_is_refused(tmp_path: Path, cache: Path) -> None:
    for number, packed in enumerate(
        (b"\x28\xb5\x2f\xfdnonsense", b"no tar " * 1000, b"\x1f\x8b" + bytes(99))
    ):
        root = tmp_path / str(number)
        root.mkdir()
        first = blob(root / "blobs", bytes(7000), packed=packed)
        others = [blob(root / "blobs", tar()) for _ in range(rootfs.host_trees() - 1)]
        with pytest.raises(CreateError, match="refused"):
            layers.bring(archive(root, chain(ChainLayer(KEY, made(), (first, *others)))))
    assert left(cache) == []


LOWER = ChainLayer("tar:" + "b" * 64)
UPPER = ChainLayer(KEY, None)
WRONG: dict[str, Callable[[], LayerChain]] = {
    "nothing": lambda: chain(ChainLayer(KEY, made()), layers=()),
    "no upper": lambda: chain(LOWER),
    "key": lambda: chain(ChainLayer("stage:../../x", made()), name="stage:../../x"),
    "kind": lambda: chain(ChainLayer("sha256:" + "a" * 64, made()), name="sha256:" + "a" * 64),
    "name": lambda: chain(ChainLayer(KEY, made()), name="stage:" + "b" * 64),
    "snapshot's name": lambda: chain(
        ChainLayer("snapshot:" + "a" * 64, made(settings=ImageSettings())), name="snapshot:../../x"
    ),
    "no settings": lambda: chain(ChainLayer("snapshot:" + "a" * 64, made()), name="snapshot:x"),
    "below": lambda: chain(ChainLayer(KEY, made(below=("stage:" + "b" * 64,)))),
    "image": lambda: chain(ChainLayer(KEY, made(image="other"))),
    "order": lambda: chain(ChainLayer(KEY, made()), LOWER),
    "many": lambda: chain(*[LOWER] * LAYERS_MAX, ChainLayer(KEY, made())),
    "form": lambda: chain(ChainLayer(KEY, made()), version=99),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_chains_that_no_store_has_are_refused(tmp_path: Path, cache: Path, wrong: str) -> None:
    blob(tmp_path / "blobs", b"")
    path = _raw(tmp_path, WRONG[wrong]())
    with pytest.raises(CreateError, match=r"inconsistent|version 99"):
        layers.bring(path)
    assert left(cache) == []


def _raw(root: Path, told: LayerChain) -> Path:
    """An export with a description that our writer never produces."""
    fine = chain(ChainLayer(KEY, made()))

    def edit(files: dict[str, bytes]) -> None:
        index = json.loads(files["index.json"])
        name = f"blobs/sha256/{index['manifests'][0]['digest'][7:]}"
        found = json.loads(files.pop(name))
        config = json.loads(files.pop(f"blobs/sha256/{found['config']['digest'][7:]}"))
        config["dutyfree"] = msgspec.to_builtins(told)
        found["config"]["digest"] = _put(files, config)
        index["manifests"][0]["digest"] = _put(files, found)
        files["index.json"] = json.dumps(index).encode()

    return archive(root, fine, edit)


def _put(files: dict[str, bytes], document: dict[str, Any]) -> str:
    data = json.dumps(document).encode()
    digest = hashlib.sha256(data).hexdigest()
    files[f"blobs/sha256/{digest}"] = data
    return f"sha256:{digest}"


def test_a_layer_for_another_number_of_file_systems_is_refused(tmp_path: Path, cache: Path) -> None:
    one = blob(tmp_path / "blobs", tar())
    with pytest.raises(CreateError, match="file systems"):
        layers.bring(archive(tmp_path, chain(ChainLayer(KEY, made(), (one,) * (rootfs.host_trees() + 1)))))
    assert left(cache) == []


def test_layers_of_another_machine_are_refused(tmp_path: Path, cache: Path) -> None:
    first = blob(tmp_path / "blobs", tar())
    told = chain(ChainLayer(KEY, made(identity="host other"), (first,)), identity="host other")
    with pytest.raises(CreateError, match="software of another machine"):
        layers.bring(archive(tmp_path, told))
    told = chain(
        ChainLayer(KEY, made(image="debian:12", identity="x"), (first,)), image="debian:12", identity="x"
    )
    with pytest.raises(CreateError, match="not here and not included"):
        layers.bring(archive(tmp_path, told))
    assert left(cache) == []


@pytest.mark.parametrize("name", ["index.json", "manifest", "config", "blob"])
def test_every_document_is_verified(tmp_path: Path, cache: Path, name: str) -> None:
    """With one byte changed, the export is refused."""
    told = whole(tmp_path, member("workspace/a", os.urandom(5000)))

    def edit(files: dict[str, bytes]) -> None:
        index = json.loads(files["index.json"])
        found = f"blobs/sha256/{index['manifests'][0]['digest'][7:]}"
        config = f"blobs/sha256/{json.loads(files[found])['config']['digest'][7:]}"
        first = f"blobs/sha256/{told.layers[0].blobs[0].digest[7:]}"
        which = {"index.json": "index.json", "manifest": found, "config": config, "blob": first}[name]
        data = bytearray(files[which])
        data[len(data) // 2] ^= 1
        files[which] = bytes(data)

    with pytest.raises(DutyfreeError):
        layers.bring(archive(tmp_path, told, edit))
    assert left(cache) == []


def test_cut_archives_and_other_files_are_refused(tmp_path: Path, cache: Path) -> None:
    path = archive(tmp_path, whole(tmp_path, member("a", os.urandom(50_000))))
    data = path.read_bytes()
    for length in (0, 100, 1000, 20_000, len(data) // 2):
        path.write_bytes(data[:length])
        with pytest.raises(DutyfreeError):
            layers.bring(path)
    path.write_bytes(os.urandom(100_000))
    with pytest.raises(DutyfreeError):
        layers.bring(path)
    with pytest.raises(DutyfreeError, match="there is no"):
        layers.bring(tmp_path / "absent.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DutyfreeError, match="contains no layers"):
        layers.bring(tmp_path / "empty")
    assert left(cache) == []


def test_documents_without_end_are_refused(tmp_path: Path, cache: Path) -> None:
    def edit(files: dict[str, bytes]) -> None:
        files["index.json"] = b" " * (5 << 20)

    with pytest.raises(CreateError, match="too large"):
        layers.bring(archive(tmp_path, whole(tmp_path), edit))
    assert left(cache) == []


def test_an_image_of_another_content_is_not_replaced(tmp_path: Path, cache: Path) -> None:
    del cache
    from dutyfree.engine.store.records import StoredImage

    mine = StoredImage(
        name="n", digest="sha256:" + "1" * 64, layers=(), mounted=(), settings=ImageSettings(), size=0
    )
    Store().put_image(mine)
    other = msgspec.structs.replace(mine, digest="sha256:" + "2" * 64)
    first = blob(tmp_path / "blobs", tar())
    lower = ChainLayer("tar:" + first.diff_id[7:], None, (first,))
    upper = ChainLayer(KEY, made(image="n", identity=other.digest), (first,))
    told = chain(lower, upper, image="n", identity=other.digest, stored_image=other)
    with pytest.raises(CreateError, match="another image here"):
        layers.bring(archive(tmp_path, told))
    assert Store().images() == [mine]
