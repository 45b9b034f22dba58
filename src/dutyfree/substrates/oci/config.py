"""The options of the substrate ``oci``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class OciConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``oci``."""

    runtime: Literal["crun", "runc", "runsc"] = "crun"
    """The program that makes containers. runsc is gVisor."""
    program: str = ""
    """The path of that program; by default the one in PATH."""
    actions: Literal["init", "exec"] = "init"
    """How actions reach the container: our init over one kept stream, or the runtime's exec for each."""
    image: str = ""
    """The image of recipes that name none (docs/images.md); by default the study's image."""
    storage: Literal["memory", "disk"] = "memory"
    """Where written files go: to a tmpfs, or to a directory on disk."""
    directory: str = ""
    """Where this substrate keeps what it needs for its containers; by default in TMPDIR or /tmp."""
    restore: bool = False
    """gVisor only: restore each container from a checkpoint of a container whose init is ready."""
    start_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """How long a container may take to start."""
    end_seconds: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """How long a container may take to end."""

    def __post_init__(self) -> None:
        if self.restore and self.runtime != "runsc":
            raise ValueError('restore: only runsc restores containers; leave it out, or use runtime="runsc"')
