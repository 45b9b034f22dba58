"""dutyfree: measure the rollout infrastructure tax, and stop paying it.

>>> async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
...     observation = await sandbox.exec("echo hello")

``dutyfree.sync.open`` is the same for programs without an event loop.
"""

from dutyfree import errors
from dutyfree.contract import (
    Action,
    Availability,
    Cut,
    Edit,
    Entry,
    Exec,
    Found,
    Limits,
    List,
    Match,
    Observation,
    Read,
    Recipe,
    Sandbox,
    Search,
    Span,
    Stage,
    Substrate,
    Usage,
    Write,
)
from dutyfree.services import Ready, Service
from dutyfree.substrates import open  # noqa: A004 (dutyfree.open reads as intended)

__version__ = "0.1.0"

__all__ = [
    "Action",
    "Availability",
    "Cut",
    "Edit",
    "Entry",
    "Exec",
    "Found",
    "Limits",
    "List",
    "Match",
    "Observation",
    "Read",
    "Ready",
    "Recipe",
    "Sandbox",
    "Search",
    "Service",
    "Span",
    "Stage",
    "Substrate",
    "Usage",
    "Write",
    "errors",
    "open",
]
