"""What the interface of a provider must do. All of it blocks, and raises ApiError alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from dutyfree.contract.errors import CreateError, DutyfreeError, Exhausted, SubstrateError, Unavailable

OURS = "dutyfree"
OWNER = "dutyfree-owner"
RUN = "dutyfree-run"
NAME = "dutyfree-name"
DEADLINE = "dutyfree-deadline"
LABEL = "dutyfree-label-"
"""The tags of an instance: OURS is "1", OWNER a process, RUN an opening, DEADLINE seconds since 1970."""

State: TypeAlias = Literal["pending", "running", "ended", "stopped"]

Kind: TypeAlias = Literal[
    "credentials",
    "permission",
    "quota",
    "capacity",
    "image",
    "size",
    "network",
    "request",
    "busy",
    "unclear",
    "broken",
]
"""Why a request failed. ``busy``: it did not happen, so try later. ``unclear``: it may have happened, since
there was no answer. ``broken``: it may have happened, since libcloud failed."""

MAYBE: tuple[Kind, ...] = ("unclear", "broken")
"""After these the request may have happened."""

PASSING: tuple[Kind, ...] = ("busy", "unclear")

_REMEDIES: dict[Kind, str] = {
    "credentials": "set the variables of an account that is allowed to use them: see docs/machines.md",
    "permission": "give the account the permissions that docs/machines.md lists",
    "quota": "ask for fewer at once, or let the provider raise the limit of the account",
    "capacity": "try another size, zone or region, or try again later",
    "image": "set the option image= to an image of this region, which the account may use",
    "size": "set the option size= to an instance type that the region and the image support",
    "network": "check the options subnet= and security_groups=",
    "busy": "ask for fewer at once, or try again later",
    "unclear": "check the network and the provider's status page",
}


class ApiError(Exception):
    """The provider refused a request, or did not answer."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind

    @property
    def passing(self) -> bool:
        return self.kind in PASSING

    def restated(self, phase: type[SubstrateError | Unavailable], what: str) -> DutyfreeError:
        """The same as an error of this phase, with a remedy."""
        text, remedy = f"{what}: {self}", _REMEDIES.get(self.kind, "")
        if self.kind in ("quota", "capacity") and phase is CreateError:
            return Exhausted(text, remedy=remedy, numbers={})
        return phase(text, remedy=remedy)


class Place(msgspec.Struct, frozen=True):
    """Where instances are. It has no credentials."""

    provider: Literal["ec2"] = "ec2"
    region: str = ""
    endpoint: str = ""


class Order(msgspec.Struct, frozen=True):
    """The instance that is wanted. The provider makes at most one of a ``name``."""

    name: str
    image: str
    size: str
    user_data: str
    tags: Mapping[str, str]
    subnet: str = ""
    security_groups: tuple[str, ...] = ()
    public: bool = True
    """Whether it needs a public address."""
    arguments: Mapping[str, Any] = {}


class Instance(msgspec.Struct, frozen=True):
    """An instance as the provider describes it."""

    id: str
    state: State
    tags: Mapping[str, str]
    public: str = ""
    private: str = ""
    reason: str = ""
    """Why it is in this state, if the provider says so."""

    @property
    def name(self) -> str:
        return self.tags.get(NAME, "")


class Api(Protocol):
    """The interface of a provider in a place."""

    place: Place
    """Where it is, with the region that it found in the environment."""

    def create(self, order: Order) -> Instance: ...

    def find(self, tags: Mapping[str, str]) -> Sequence[Instance]:
        """The instances with all these tags, those that ended lately among them."""

    def end(self, instance: str) -> bool:
        """End an instance. False if the provider does not know it: any more, or yet."""

    def price(self, size: str) -> float | None:
        """What an hour costs, as libcloud knows it."""


def connected(place: Place) -> Api:
    """The interface of a place. Sends nothing. Raises Unavailable."""
    if importlib.util.find_spec("libcloud") is None:
        raise Unavailable(
            "the package apache-libcloud is not installed",
            remedy="install it: pip install -e '/path/to/dutyfree[cloud]'",
        )
    from dutyfree.substrates.cloud.ec2 import Ec2

    return Ec2(place)
