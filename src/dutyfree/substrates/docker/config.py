"""The options of the substrate ``docker``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from dutyfree import study_image as study
from dutyfree.substrates.docker.engine import ANSWER_SECONDS, REMOVE_SECONDS, Engine, socket_path


class DockerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``docker``."""

    host: str | None = None
    """The engine's Unix socket; by default DOCKER_HOST, else /var/run/docker.sock."""
    image: str = study.REFERENCE
    """The image of a recipe without one; by default the study's image, which is built if it is missing."""
    network: str = "bridge"
    """The network of sandboxes whose network is on."""
    runtime: str | None = None
    """One of the engine's runtimes, such as runsc; None is its default."""
    init: bool = True
    """Whether Docker's init is PID 1. It reaps the processes that commands leave behind."""
    actions: Literal["exec", "init"] = "exec"
    """How actions reach the container: one exec of the engine for each, or our init over one kept stream."""
    ready: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    """The number of containers to keep ready for each recipe and its limits."""
    baked: bool = False
    """Whether a workload's set-up becomes part of the image, which stays for later runs."""
    storage: Literal["disk", "memory"] = "disk"
    """Where sandboxes write: the engine's storage driver, or memory (tmpfs) for /workspace and /tmp."""
    answer_seconds: float = ANSWER_SECONDS
    """How long the engine may take to answer a question."""
    remove_seconds: float = REMOVE_SECONDS
    """How long the engine may take to remove a container or an image."""

    def engine(self) -> Engine:
        """A client of the engine. Raises Unavailable if the address is not a Unix socket."""
        path = socket_path(self.host)
        return Engine(path, answer_seconds=self.answer_seconds, remove_seconds=self.remove_seconds)
