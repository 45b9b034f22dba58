"""What this host offers, as the launcher reports it in its first reply."""

from __future__ import annotations

from typing import Literal

import msgspec


class HostFeatures(msgspec.Struct, frozen=True):
    """Which parts of the isolation this host supports."""

    mode: Literal["root", "rootless"] = "root"
    cgroup: Literal["v1", "v2", "none"] = "none"
    controllers: tuple[str, ...] = ()
    """The controllers that limit sandboxes: some of ``cpu``, ``memory`` and ``pids``."""
    ids: int = 1
    """Number of user ids in a sandbox."""
    groups: Literal["dropped", "kept"] = "dropped"
    """Whether a sandbox drops its owner's groups. Without root and without a range of ids it cannot."""
    freezer: bool = False
    """Whether the kernel can freeze processes without their notice."""
    pid: int = 0
    """The process id of the launcher."""
    without: int = 0
    """The isolation that the launcher leaves out: ``protocol.WallFlag``."""

    @property
    def counts_processes(self) -> bool:
        """Whether processes are limited: by a control group, or per user if a sandbox has one user only."""
        return "pids" in self.controllers or (self.mode == "rootless" and self.ids == 1)

    def losses(self) -> tuple[str, ...]:
        """What sandboxes lack here, compared with those of root in docs/security.md."""
        lost = [f"no limit of {name}" for name in ("cpu", "memory") if name not in self.controllers]
        if not self.counts_processes:
            lost.append("no limit of processes but the default")
        if not self.freezer:
            lost.append("pauses by signals, which processes can see")
        if self.mode == "rootless":
            lost.append("ids shared by all sandboxes")
            lost.append("files of the host's root cannot be changed")
            lost.append("the host's own network, or none")
        if self.ids == 1:
            lost.append("no other user than root")
        if self.groups == "kept":
            lost.append("the owner's groups are kept")
        return tuple(lost)


def parse(text: str) -> HostFeatures:
    """Parse the launcher's report. Raises ValueError if no launcher of this version would send it."""
    words = dict(word.partition("=")[::2] for word in text.split())
    cgroup, *controllers = words.pop("cgroup", "none").split(":")
    try:
        return msgspec.convert(
            {**words, "cgroup": cgroup, "controllers": controllers}, HostFeatures, strict=False
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"not the report of a launcher: {text!r}") from error
