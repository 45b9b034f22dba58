"""The limits of a sandbox, and sizes as text such as ``512M``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec

from dutyfree.contract.errors import LimitError

NetworkPolicy: TypeAlias = Literal["off", "on"] | tuple[str, ...]
"""What a sandbox may reach: nothing, everything that this machine reaches, or the entries of a list.

An entry is a host (``example.org``), all names below a domain (``*.example.org``), an address or a range
(``10.0.0.0/8``), or ``host``: this machine, at the substrate's ``host_address``. Each may end with a port
(``example.org:443``).
"""

Bytes: TypeAlias = Annotated[int, msgspec.Meta(description="a number of bytes or a size such as '512M'")]


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a sandbox may use. None means the substrate's default.

    Sizes may be text: ``Limits(memory="512M")``. A substrate that cannot enforce a limit raises CreateError.
    Raises LimitError for a number out of range.
    """

    cpus: float | None = None
    memory: Bytes | None = None
    pids: int | None = None
    disk: Bytes | None = None
    """Bytes that the sandbox may write."""
    network: NetworkPolicy | None = None
    """Off by default on every substrate that isolates."""
    output: Bytes = 16 << 20
    """Bytes that are kept of each stream: the head and the tail. The middle is counted and dropped."""

    if TYPE_CHECKING:
        # The constructor takes sizes as text too; the attributes are numbers.
        def __init__(
            self,
            cpus: float | None = None,
            memory: int | str | None = None,
            pids: int | None = None,
            disk: int | str | None = None,
            network: NetworkPolicy | None = None,
            output: int | str = 16 << 20,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if type(value) is not int:
                value = _number(name, value)
                msgspec.structs.force_setattr(self, name, value)
            least, bound = (-1, "≥ 0") if name == "output" else (0, "> 0")
            if not least < value <= most:
                raise LimitError(f"{name} must be {bound} and ≤ {most}, not {value}")
        if self.network not in (None, "off", "on"):
            msgspec.structs.force_setattr(self, "network", _allow_list(self.network))


_MOST = {"cpus": 1 << 17, "memory": 1 << 62, "pids": 4_000_000, "disk": 1 << 60, "output": (1 << 32) - 1}
"""The largest values that the kernel accepts."""

SIZES = ("memory", "disk", "output")
"""The limits that are in bytes."""


def _number(name: str, value: object) -> float:
    """Convert a limit that is not an int. Raises LimitError."""
    if name in SIZES and isinstance(value, str):
        return size(value, name)
    if name == "cpus" and isinstance(value, float):
        return value
    wanted = "a number" if name == "cpus" else "a whole number"
    remedy = f'write {name}="512M", or the bytes' if name in SIZES else ""
    raise LimitError(f"{name} must be {wanted}, not {value!r}", remedy=remedy)


def _allow_list(network: object) -> tuple[str, ...]:
    """Check a network policy that is neither "on" nor "off". Raises LimitError."""
    if isinstance(network, tuple | list) and all(isinstance(entry, str) for entry in network):
        return tuple(network)
    raise LimitError(
        f'network must be "on", "off" or a list of strings, not {network!r}',
        remedy='to allow one host, write network=("example.org:443",)',
    )


def size(text: str, of: str) -> int:
    """Parse a size such as ``512M``, ``1.5G`` or ``4096``. Raises LimitError."""
    import re

    units = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    found = re.fullmatch(
        r"(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII
    )
    if found is None:
        raise LimitError(f"{of}: {text!r} is not a size", remedy="write it as 512M or 1.5G")
    return int(float(found[1]) * units[found[2].upper()])


def limited(given: Limits | Mapping[str, object] | None, usual: Limits) -> Limits:
    """The limits that a caller gives, also as a table such as ``{"memory": "512M"}``; else ``usual``.

    Raises LimitError.
    """
    if given is None:
        return usual
    if isinstance(given, Limits):
        return given
    if not isinstance(given, Mapping):
        raise LimitError(f"limits must be Limits, not {given!r}", remedy='write Limits(memory="512M")')
    table = sized(given)
    try:
        return msgspec.convert(table, Limits)
    except msgspec.ValidationError as error:
        from dutyfree import validation  # only for an error

        mistake = validation.explain(error, table, Limits)
        raise LimitError(f"limits: {mistake.message}", remedy=mistake.remedy) from error


def sized(table: Mapping[str, object]) -> dict[str, object]:
    """Replace the sizes in a table of limits or of a budget by numbers; leave other values as they are."""
    found = dict(table)
    for name in SIZES:
        value = table.get(name)
        if isinstance(value, str):
            with suppress(LimitError):
                found[name] = size(value, name)
    return found
