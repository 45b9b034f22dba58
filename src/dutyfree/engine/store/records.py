"""What the layer store writes as JSON: images and named snapshots, with the layers that they need."""

from __future__ import annotations

import msgspec


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an image says that programs in it are run."""

    env: dict[str, str] = {}
    user: str = ""
    workdir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()

    @property
    def program(self) -> tuple[str, ...]:
        """The image's default program: its entry point and its command."""
        return self.entrypoint + self.cmd


class StoredImage(msgspec.Struct, frozen=True, kw_only=True):
    """An image under its name."""

    name: str
    digest: str
    """Digest of the manifest, or another identity of the contents if there is no manifest."""
    layers: tuple[str, ...]
    """Keys of the image's own layers, the lowest first."""
    mounted: tuple[str, ...]
    """Keys of the layers that sandboxes mount, the uppermost first."""
    settings: ImageSettings
    size: int
    source: str = ""
    """Identity of a local file or a daemon's image, which may change under its name."""
    created: str = ""
    added: float = 0.0

    @property
    def keys(self) -> set[str]:
        """Keys of all layers that the image needs."""
        return {*self.layers, *self.mounted}


class NamedSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a sandbox under a name: one layer and all layers below it."""

    name: str
    layer: str
    below: tuple[str, ...]
    """Keys of the layers below it, including the image's."""
    size: int
    """Bytes of its own layer."""
    made: float
    """Seconds since the epoch."""

    @property
    def keys(self) -> set[str]:
        """Keys of all layers that the snapshot needs."""
        return {self.layer, *self.below}
