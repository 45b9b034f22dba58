"""The values that pass between the scheduler and the pool: requests, operations, failures, options.

The scheduler sees a recipe as a ``PrefixChain``: the content keys of its prefixes. ``keys[0]`` is the base (a
sandbox without an image), ``keys[1]`` the image, then there is one key for each stage. A *depth* is an index
into the keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from dutyfree.contract import Recipe
from dutyfree.contract.errors import LimitError
from dutyfree.contract.served import ServedKind

BASE = "base"


class PrefixChain(msgspec.Struct, frozen=True):
    """The prefixes of one recipe, from the base to all stages."""

    keys: tuple[str, ...]
    kinds: tuple[str, ...]
    recipe: Recipe = Recipe()
    """For the source, which runs the stages; the scheduler does not read it."""
    layers: tuple[str, ...] = ()
    """The keys of the layers of these prefixes. Layers hold files only, so services do not change them."""
    recipe_key: str = ""
    """The key of the whole recipe with its variables. Only services make idle sandboxes depend on those."""

    @classmethod
    def of(cls, recipe: Recipe, keys: tuple[str, ...] | None = None) -> PrefixChain:
        """The chain of a recipe. Without ``keys``, this reads the recipe's files. Raises OSError."""
        layers = (BASE, *(keys or recipe.keys()))
        recipe_key = recipe.served_key(layers[-1])
        keys = (*layers[:-1], recipe_key) if recipe.services else layers
        kinds = (BASE, "image", *(stage.kind for stage in recipe.stages))
        return cls(keys, kinds, recipe, layers, recipe_key)

    @property
    def key(self) -> str:
        return self.keys[-1]

    @property
    def depth(self) -> int:
        return len(self.keys) - 1


def _check_least(values: msgspec.Struct, least: Mapping[str, float]) -> None:
    for name, low in least.items():
        value = getattr(values, name)
        if value is not None and not value >= low:  # not value < low: NaN must fail too
            raise LimitError(f"{name} must be at least {low:g}, not {value}")


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The most that a pool may hold. Raises LimitError for values that are too small."""

    sandboxes: int = 1000
    """Sandboxes that are alive at once: idle, leased, being made, being reset."""
    memory: int = 4 << 30
    """Bytes of memory. Each sandbox counts with the memory it uses while idle."""
    disk: int = 20 << 30
    """Bytes of layers on disk."""
    sandbox_memory: int = 1_000_000
    """Bytes of memory of an idle sandbox, until one with the same recipe was measured."""
    layer_disk: int = 50 << 20
    """Bytes of a layer, before it is built."""

    def __post_init__(self) -> None:
        _check_least(self, _LEAST_BUDGET)


_LEAST_BUDGET = {"sandboxes": 1, "memory": 1, "disk": 0, "sandbox_memory": 1, "layer_disk": 0}


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the scheduler decides. The first group turns abilities off, to compare with simpler pools.

    Raises LimitError for values that are too small.
    """

    park: bool = True
    """Keep idle sandboxes: reset returned ones, and refill."""
    partial: bool = True
    """Promote idle sandboxes at a shorter prefix."""
    join: bool = True
    """Let a request take over a refill in progress."""
    fork: bool = True
    """Prepare one sandbox of a group, and fork the others from it."""
    refill: bool = True
    """Refill by demand. Hints and minimums are followed in any case."""
    deepest_layer: int | None = None
    """The longest prefix whose layer is kept and used: None for all, 0 for none, 1 for images only."""
    shallowest: int = 1
    """The shortest prefix at which sandboxes are kept idle. 0 includes bases."""

    starting: int = 8
    """Sandboxes that are made at once for requests."""
    refilling: int = 2
    """Sandboxes that are made at once in the background. None starts while a request waits."""
    resetting: int = 16
    """Sandboxes that are reset at once while requests wait. Beyond that, those with a layer are discarded."""
    late: float = 60.0
    """Seconds after which a refill may be late. A late refill does not count against ``refilling``."""
    cover: float = 5.0
    """Seconds of expected requests to keep stock for, beyond the time of a refill."""
    half_life: float = 120.0
    """Seconds after which a past request counts half as demand."""
    hint_seconds: float = 600.0
    """Seconds after which an unused hint is forgotten."""
    idle_seconds: float | None = None
    """Seconds after which an idle sandbox is removed; None for never."""
    remembered: float = 600.0
    """Seconds for which the idempotency key of an ended lease stays known."""
    recipes: int = 20_000
    """The most recipes to remember. Beyond that, the least recently used are forgotten."""

    attempts: int = 3
    """Failures of the machinery after which a request is refused."""
    tolerated: int = 3
    """Failures in a row after which a stage is quarantined."""
    backoff: float = 1.0
    """Seconds until the first retry. They double with each failure."""
    longest_backoff: float = 300.0
    """The most seconds between two retries."""
    seed: int = 0
    """The seed of the jitter."""

    def __post_init__(self) -> None:
        _check_least(self, _LEAST_POLICY)


_LEAST_POLICY = {
    **dict.fromkeys(("starting", "recipes", "attempts", "tolerated"), 1),
    **dict.fromkeys(("half_life", "backoff", "longest_backoff"), 0.001),
    **dict.fromkeys(("deepest_layer", "shallowest", "refilling", "resetting", "cover", "late"), 0),
    **dict.fromkeys(("hint_seconds", "idle_seconds", "remembered"), 0),
}


class LeaseRequest(msgspec.Struct, frozen=True):
    """A request for ``count`` sandboxes of one recipe."""

    id: int
    chain: PrefixChain
    deadline: float
    """When it must be answered, on the caller's clock."""
    count: int = 1
    lease_seconds: float | None = None
    labels: Mapping[str, str] = {}


class Candidate(NamedTuple):
    """One possible way to serve a request, and its distance."""

    kind: ServedKind
    depth: int
    """The depth that need not be made."""
    seconds: float
    """The distance: estimated seconds for the rest."""
    promised: bool = False
    """Whether it would take an idle sandbox that was promised to others by a hint or a minimum."""


class JobResult(msgspec.Struct, frozen=True, kw_only=True):
    """What it cost to make a sandbox, and what the store has of it now."""

    create_seconds: float | None = None
    """Seconds to create the sandbox, without stages; None for a promotion."""
    stage_seconds: Sequence[float] = ()
    """Seconds of each stage that ran, in order."""
    layers: Mapping[int, int] = {}
    """The size in bytes of each layer that is in the store now, by depth."""
    memory: int | None = None
    """Bytes of memory that the sandbox uses while it is idle."""
    found: int | None = None
    """The depth from which stages had to run, if it differs from the scheduler's."""
    joined: bool = False
    """The missing stages were already being built for another request."""
    fetched: bool = False
    """It was made on layers from a peer."""


class JobFailure(msgspec.Struct, frozen=True):
    """Why a sandbox could not be made: the stage at ``depth`` failed, or without a depth the machinery."""

    message: str
    depth: int | None = None
    command: str = ""
    output: str = ""
    remedy: str = ""


class Shortage(msgspec.Struct, frozen=True):
    """The state of a pool that could not serve a request in time."""

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
    """Seconds until the request would have been served, at the present rate of returns."""
    preparing: str = ""
    """The stage that was running for this request, if it had left the queue."""
    never: bool = False
    """Whether the whole budget is too small for the request."""


class Quarantine(msgspec.Struct, frozen=True):
    """A stage that failed too often in a row, and the seconds until its next retry."""

    stage: str
    key: str
    failures: int
    retry_in: float
    failure: JobFailure


# --- Operations: what decide() tells the pool to do -------------------------------------------------


class Make(msgspec.Struct, frozen=True):
    """Make a sandbox at ``depth``: promote ``origin``, or create one on the layer at ``start``."""

    job: int
    chain: PrefixChain
    start: int
    depth: int
    origin: str | None
    keep: int
    """Keep the layers of the stages up to this depth."""
    background: bool
    after: tuple[str, ...] = ()
    """Sandboxes that must be destroyed before it starts, so that the budget holds at every moment."""


class Fork(msgspec.Struct, frozen=True):
    """Copy an unused sandbox, once for each job."""

    origin: str
    chain: PrefixChain
    jobs: tuple[int, ...]
    after: tuple[str, ...] = ()


class Member(msgspec.Struct, frozen=True):
    """One sandbox of a delivery: how it was served, and from which depth on."""

    sandbox: str
    kind: ServedKind
    start: int


class Deliver(msgspec.Struct, frozen=True):
    """Hand the sandboxes of a request out."""

    request: int
    members: tuple[Member, ...]
    until: float | None
    cold_seconds: float
    """Estimated seconds of a cold start of one of them."""
    waited: float = 0.0
    """Seconds that the request waited for room in the budget."""


class Refuse(msgspec.Struct, frozen=True):
    """Answer a request with an error."""

    request: int
    reason: Shortage | Quarantine | JobFailure


class Prioritize(msgspec.Struct, frozen=True):
    """Raise the priority of a background job: a request waits for it now."""

    job: int


class Expire(msgspec.Struct, frozen=True):
    """End the lease of this request: it was not kept alive."""

    request: int


class Reset(msgspec.Struct, frozen=True):
    """Reset and verify a returned sandbox."""

    sandbox: str


DestroyReason: TypeAlias = Literal["evicted", "returned", "expired", "stale", "died"]


class Destroy(msgspec.Struct, frozen=True):
    """Remove a sandbox."""

    sandbox: str
    reason: DestroyReason


class Forget(msgspec.Struct, frozen=True):
    """Drop a layer that no sandbox and no other layer uses."""

    key: str


Operation: TypeAlias = Make | Prioritize | Fork | Deliver | Refuse | Expire | Reset | Destroy | Forget
