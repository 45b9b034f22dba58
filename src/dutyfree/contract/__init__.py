"""The contract between substrates and callers: the nouns of the system.

A *substrate* creates *sandboxes*. An agent's *action* in a sandbox returns an *observation*, with timing
*spans*. A *recipe* describes the state in which a sandbox starts.

Start with ``sandbox`` and ``substrate``; ``abilities`` has what only some substrates can do, ``errors`` the
tree of exceptions. ``arguments``, ``entries``, ``output`` and ``perform`` are the rules that all substrates
share. This room imports only ``validation`` and ``printable``.
"""

from dutyfree.contract.action import (
    Action,
    Command,
    Edit,
    Entry,
    Exec,
    Found,
    List,
    Match,
    Read,
    Result,
    Search,
    Write,
)
from dutyfree.contract.limits import SIZES, Bytes, Limits, NetworkPolicy, limited, size, sized
from dutyfree.contract.observation import KILLED, Cut, Observation, Span, Usage
from dutyfree.contract.recipe import Recipe
from dutyfree.contract.sandbox import Sandbox
from dutyfree.contract.stage import Stage
from dutyfree.contract.substrate import Availability, Provider, Substrate

__all__ = [
    "KILLED",
    "SIZES",
    "Action",
    "Availability",
    "Bytes",
    "Command",
    "Cut",
    "Edit",
    "Entry",
    "Exec",
    "Found",
    "Limits",
    "List",
    "Match",
    "NetworkPolicy",
    "Observation",
    "Provider",
    "Read",
    "Recipe",
    "Result",
    "Sandbox",
    "Search",
    "Span",
    "Stage",
    "Substrate",
    "Usage",
    "Write",
    "limited",
    "size",
    "sized",
]
