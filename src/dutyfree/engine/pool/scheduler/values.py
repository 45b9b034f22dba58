"""The words between the scheduler and whoever carries its decisions out. All frozen.

A *chain* is a recipe as the scheduler sees it: the content keys of its prefixes. ``keys[0]`` is the base (a
sandbox without an image), ``keys[1]`` the image, then one key for each stage. A *depth* is an index into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from dutyfree.contract import Recipe
from dutyfree.contract.errors import LimitError
from dutyfree.contract.served import ServedKind

BASE = "base"


class PrefixChain(msgspec.Struct, frozen=True):
    keys: tuple[str, ...]
    kinds: tuple[str, ...]
    recipe: Recipe = Recipe()
    """For whoever runs the stages; the scheduler does not look into it."""
    layers: tuple[str, ...] = ()
    """What layers of these states are known by: files have no services."""
    whole: str = ""
    """The key of the recipe with its variables, of which a sandbox without services knows nothing."""

    @classmethod
    def of(cls, recipe: Recipe, keys: tuple[str, ...] | None = None) -> PrefixChain:
        """Without keys, reads the recipe's files, if it names some. Raises OSError."""
        layers = (BASE, *(keys or recipe.keys()))
        whole = recipe.served_key(layers[-1])
        keys = (*layers[:-1], whole) if recipe.services else layers
        kinds = (BASE, "image", *(stage.kind for stage in recipe.stages))
        return cls(keys, kinds, recipe, layers, whole)

    @property
    def key(self) -> str:
        return self.keys[-1]

    @property
    def depth(self) -> int:
        return len(self.keys) - 1


def _refuse_less(values: msgspec.Struct, least: Mapping[str, float]) -> None:
    for name, low in least.items():
        value = getattr(values, name)
        if value is not None and not value >= low:  # nor what is no number
            raise LimitError(f"{name} must be at least {low:g}, not {value}")


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all sandboxes of the pool together may take. Raises LimitError for what cannot be."""

    sandboxes: int = 1000
    """Alive at once: idle, handed out, in the making, being reset."""
    memory: int = 4 << 30
    """Bytes, counting each sandbox as it is when idle."""
    disk: int = 20 << 30
    """Bytes of layers."""
    sandbox_memory: int = 1_000_000
    """Of a sandbox whose kind was not measured yet."""
    layer_disk: int = 50 << 20
    """Of a layer whose kind was not measured yet."""

    def __post_init__(self) -> None:
        _refuse_less(self, _LEAST_BUDGET)


_LEAST_BUDGET = {"sandboxes": 1, "memory": 1, "disk": 0, "sandbox_memory": 1, "layer_disk": 0}


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The knobs; the first group restricts the scheduler to what lesser pools do.

    Raises LimitError for what cannot be.
    """

    park: bool = True
    """Keep returned sandboxes, and refill."""
    partial: bool = True
    """Promote idle sandboxes of a shorter prefix."""
    join: bool = True
    """Take over a refill that is under way."""
    fork: bool = True
    """Copy one prepared sandbox for the rest of a group."""
    refill: bool = True
    """Follow demand; hints and minima are followed anyhow."""
    deepest_layer: int | None = None
    """Layers of longer prefixes are neither kept nor used; None uses all, 0 none, 1 images alone."""
    shallowest: int = 1
    """No sandbox is parked at a shorter prefix; 0 parks bases, where the source can promote them."""

    starting: int = 8
    """Sandboxes made at once for requests."""
    refilling: int = 2
    """Sandboxes made at once in the background, and only while no request waits."""
    resetting: int = 16
    """Sandboxes reset at once while others are made for requests; more are discarded, if a layer has them."""
    late: float = 60.0
    """Seconds after which one of these no longer keeps others from being made beside it, at the least."""
    cover: float = 5.0
    """Seconds of expected arrivals, beyond the time that a refill takes, that stock is kept for."""
    half_life: float = 120.0
    """Seconds after which an arrival counts half."""
    hint_seconds: float = 600.0
    """A hint that nobody came for is forgotten after this."""
    idle_seconds: float | None = None
    """An idle sandbox that nobody came for is removed after this."""
    remembered: float = 600.0
    """Seconds for which the idempotency key of an ended lease is known."""
    recipes: int = 20_000
    """So many are known; beyond, those not asked for longest are forgotten."""

    attempts: int = 3
    """A request survives so many failures of the machinery."""
    tolerated: int = 3
    """Failures of a stage in a row that open its breaker."""
    backoff: float = 1.0
    """Seconds until the first retry; doubled each time."""
    longest_backoff: float = 300.0
    seed: int = 0
    """Of the jitter."""

    def __post_init__(self) -> None:
        _refuse_less(self, _LEAST_POLICY)


_LEAST_POLICY = {
    **dict.fromkeys(("starting", "recipes", "attempts", "tolerated"), 1),
    **dict.fromkeys(("half_life", "backoff", "longest_backoff"), 0.001),
    **dict.fromkeys(("deepest_layer", "shallowest", "refilling", "resetting", "cover", "late"), 0),
    **dict.fromkeys(("hint_seconds", "idle_seconds", "remembered"), 0),
}


class LeaseRequest(msgspec.Struct, frozen=True):
    id: int
    chain: PrefixChain
    deadline: float
    """By the caller's clock; an answer is given by then."""
    count: int = 1
    lease_seconds: float | None = None
    labels: Mapping[str, str] = {}


class Candidate(NamedTuple):
    """One candidate to serve a request, and what it would still cost."""

    kind: ServedKind
    depth: int
    """What is there already."""
    seconds: float
    wanted: bool = False
    """Others were promised this one."""


class JobFailure(msgspec.Struct, frozen=True):
    """Why a sandbox could not be made. Without a depth the machinery failed, else a stage of the recipe."""

    message: str
    depth: int | None = None
    command: str = ""
    output: str = ""
    remedy: str = ""


class Shortage(msgspec.Struct, frozen=True):
    """The numbers of an exhausted pool."""

    waited: float
    wanted: int
    idle: int
    leased: int
    making: int
    resetting: int
    sandboxes: int
    memory: int
    memory_limit: int
    queue: int
    estimated_wait: float | None
    """Seconds until the request would have been served, by the present rate of returns."""
    preparing: str = ""
    """The stage that was under way for this request, if it was no longer queued."""
    never: bool = False
    """The budget has no room for so many, whoever gives back what."""


class Quarantine(msgspec.Struct, frozen=True):
    """A stage that failed too often in a row, and when it is tried again."""

    stage: str
    key: str
    failures: int
    retry_in: float
    failure: JobFailure


# --- Operations: what decide() asks for -------------------------------------------------------------


class Make(msgspec.Struct, frozen=True):
    """Bring a sandbox to ``depth``: ``origin`` by promotion, or a new one on the layer at ``start``."""

    job: int
    chain: PrefixChain
    start: int
    depth: int
    origin: str | None
    keep: int
    """Layers are kept up to this depth."""
    background: bool
    after: tuple[str, ...] = ()
    """Sandboxes that must be gone before, so that budgets hold at every moment."""


class Fork(msgspec.Struct, frozen=True):
    """Copy a sandbox that nobody has used yet, once for each job."""

    origin: str
    chain: PrefixChain
    jobs: tuple[int, ...]
    after: tuple[str, ...] = ()


class Member(msgspec.Struct, frozen=True):
    sandbox: str
    kind: ServedKind
    start: int


class Deliver(msgspec.Struct, frozen=True):
    request: int
    members: tuple[Member, ...]
    until: float | None
    cold_seconds: float
    """What one of them would have cost with nothing at hand."""
    waited: float = 0.0
    """Seconds until there was room for them."""


class Refuse(msgspec.Struct, frozen=True):
    request: int
    reason: Shortage | Quarantine | JobFailure


class Prioritize(msgspec.Struct, frozen=True):
    """Somebody waits now for a job that was begun in the background."""

    job: int


class Expire(msgspec.Struct, frozen=True):
    """Nobody kept the lease of this request alive; its sandboxes go."""

    request: int


class Reset(msgspec.Struct, frozen=True):
    sandbox: str


Reason: TypeAlias = Literal["evicted", "returned", "expired", "stale", "died"]


class Destroy(msgspec.Struct, frozen=True):
    sandbox: str
    reason: Reason


class Forget(msgspec.Struct, frozen=True):
    """Remove a layer that no sandbox and no other layer stands on."""

    key: str


Operation: TypeAlias = Make | Prioritize | Fork | Deliver | Refuse | Expire | Reset | Destroy | Forget
