"""What the launcher found on this host, as it says in its first reply."""

from __future__ import annotations

from typing import Literal

import msgspec


class HostFeatures(msgspec.Struct, frozen=True):
    mode: Literal["root", "rootless"] = "root"
    cgroup: Literal["v1", "v2", "none"] = "none"
    controllers: tuple[str, ...] = ()
    """Of ``cpu``, ``memory`` and ``pids``, those by which sandboxes are limited."""
    ids: int = 1
    """How many user ids a sandbox has."""
    groups: Literal["dropped", "kept"] = "dropped"
    """Whether a sandbox has left the groups of its owner; without root and a range of ids it cannot."""

    freezer: bool = False
    """Whether processes can be frozen, unseen by themselves."""

    @property
    def counts_processes(self) -> bool:
        """By a control group, or by the user, if the sandbox has but one."""
        return "pids" in self.controllers or (self.mode == "rootless" and self.ids == 1)

    def losses(self) -> tuple[str, ...]:
        """What a sandbox lacks here of what docs/security.md promises to root's."""
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
    """Raises ValueError on what no launcher of this version says."""
    words = dict(word.partition("=")[::2] for word in text.split())
    cgroup, *controllers = words.pop("cgroup", "none").split(":")
    try:
        return msgspec.convert(
            {**words, "cgroup": cgroup, "controllers": controllers}, HostFeatures, strict=False
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"not what a launcher says: {text!r}") from error
