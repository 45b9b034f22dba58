"""What isolates sandboxes: the walls, which of them are switched off, and directories without an overlay.

A launcher has the same walls for all its sandboxes. So an open substrate never mixes isolated sandboxes with
others, and neither does its pool.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

from dutyfree.contract import Limits
from dutyfree.contract.errors import CreateError
from dutyfree.contract.recipe import IsolationLevel
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Place, PlaceKind, WallFlag

Wall: TypeAlias = Literal[
    "overlay",
    "user-namespace",
    "namespaces",
    "seccomp",
    "memory-cgroup",
    "cgroups",
    "cpu-priority",
]
WALLS: tuple[Wall, ...] = get_args(Wall)

Tier: TypeAlias = Literal["full", "namespace", "gvisor", "microvm", "none"]
"""What isolates the sandboxes of a node. ``full`` and ``namespace`` are the same. The launcher makes the
sandboxes of these and of ``none``; another substrate makes those of ``gvisor`` and ``microvm``."""

_FLAGS: dict[Wall, WallFlag] = {
    "user-namespace": WallFlag.USER_NAMESPACE,
    "namespaces": WallFlag.NAMESPACES,
    "seccomp": WallFlag.SECCOMP,
    "memory-cgroup": WallFlag.MEMORY_CGROUP,
    "cgroups": WallFlag.CGROUPS,
    "cpu-priority": WallFlag.CPU_PRIORITY,
}

WORK_DIRECTORIES = ("/workspace", "/tmp")  # noqa: S108 (of a sandbox)
SOFTWARE = ("/usr",)


class Isolation(NamedTuple):
    """The isolation of all sandboxes of one launcher. Made by ``isolation``."""

    without: tuple[Wall, ...] = ()
    plain: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()

    @property
    def full(self) -> bool:
        return not self.without

    @property
    def level(self) -> str:
        """``full``, ``none``, or what is switched off."""
        if not self.without:
            return "full"
        return "none" if set(self.without) == set(WALLS) else f"without {', '.join(self.without)}"

    @property
    def flags(self) -> WallFlag:
        """The walls that the launcher leaves out. The overlay is no flag: each request has its places."""
        flags = WallFlag(0)
        for wall in self.without:
            flags |= _FLAGS.get(wall, WallFlag(0))
        return flags

    @property
    def shares_network(self) -> bool:
        """Whether sandboxes use the host's network and its IPC objects."""
        return "namespaces" in self.without

    def places(self, *, building: bool) -> tuple[Place, ...]:
        """The directories without an overlay.

        A sandbox in which stages run has none: a stage may write everywhere, and its layer must contain
        nothing but what it wrote.
        """
        if building:
            return ()
        plain = [(path.lstrip("/"), PlaceKind.PLAIN) for path in self.plain]
        return (*plain, *((path.lstrip("/"), PlaceKind.FIXED) for path in self.fixed))

    def mounted(self, ready: tuple[int, ...], *, building: bool) -> tuple[str, ...]:
        """The places of a sandbox that are no overlay, as its first frame says."""
        places = self.places(building=building)
        return tuple(f"/{path}" for number, (path, _) in enumerate(places) if ready[1] >> number & 1)

    def refuse_limits(self, limits: Limits) -> None:
        """Raises CreateError for a limit that a missing wall would have to enforce."""
        refused = []
        if "cgroups" in self.without:
            refused = [name for name in ("cpus", "memory", "pids") if getattr(limits, name) is not None]
        elif "memory-cgroup" in self.without and limits.memory is not None:
            refused = ["memory"]
        if self.shares_network and limits.network not in (None, "on"):
            refused.append("network")
        if refused:
            raise CreateError(
                f"native cannot limit {', '.join(refused)} with isolation {self.level!r}",
                remedy="leave it out, or open native with full isolation",
            )

    def refuse_recipe(self, wanted: IsolationLevel | None) -> None:
        """Raises CreateError if a recipe asks for isolation that these sandboxes lack."""
        if wanted == "full" and not self.full:
            raise CreateError(
                f"the recipe asks for isolation, and this substrate was opened with isolation {self.level!r}",
                remedy="open native with full isolation, which is the default",
            )


FULL_ISOLATION = Isolation()


def isolation(
    level: Tier,
    without: Sequence[Wall],
    plain: Sequence[str],
    fixed: Sequence[str] | None,
) -> Isolation:
    """The isolation that the options of native describe. Raises ValueError for options that contradict."""
    if level not in ("full", "namespace") and without:
        raise ValueError(f"without: isolation is {level!r}; use one of the two options")
    if len(set(without)) < len(without):
        raise ValueError("without: names a wall twice")
    off = WALLS if level == "none" else tuple(wall for wall in WALLS if wall in without)
    usual = SOFTWARE if "overlay" in off else ()
    found = Isolation(off, tuple(plain), tuple(usual if fixed is None else fixed))
    _check(found)
    return found


def _check(found: Isolation) -> None:
    """Raises ValueError."""
    paths = [("plain", path) for path in found.plain] + [("fixed", path) for path in found.fixed]
    for option, path in paths:
        if posixpath.normpath(path) != path or not path.startswith("/") or path in ("/", "//"):
            raise ValueError(f"{option}: {path!r} is not an absolute path of a directory below /")
        if len(path.encode()) > protocol.MOUNTPOINT_MAX - 1 or "\0" in path:
            raise ValueError(f"{option}: {path!r} is longer than {protocol.MOUNTPOINT_MAX - 1} bytes")
        if path.split("/")[1] in ("proc", "dev", "sys"):
            raise ValueError(f"{option}: {path!r} is a directory of the kernel")
        if option == "plain" and path.count("/") > 1:
            raise ValueError(f"plain: {path!r} must be a directory of the root, such as /workspace")
    if len({path for _, path in paths}) < len(paths):
        raise ValueError("plain, fixed: a directory is named twice")
    if len(paths) > protocol.PLACES_MAX:
        raise ValueError(f"plain, fixed: more than {protocol.PLACES_MAX} directories")
