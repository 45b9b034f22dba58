"""dutyfree: measure the rollout infrastructure tax, and stop paying it.

>>> async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
...     observation = await sandbox.exec("echo hello")

``dutyfree.sync.open`` does the same for programs without an event loop.
"""

TYPE_CHECKING = False  # not from typing, which takes longer to load than this module
if TYPE_CHECKING:
    from dutyfree import layers, recipes, sync
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
        abilities,
        errors,
    )
    from dutyfree.contract.errors import ActionError
    from dutyfree.contract.services import Ready, Service
    from dutyfree.substrates import open
else:

    def __getattr__(name: str) -> object:
        """Load a name when it is first used, so that the command line starts at once."""
        from importlib import import_module

        if name in _MODULES:
            return import_module(_MODULES[name])
        if name in __all__:
            for home in _HOMES:
                module = import_module(home)
                if hasattr(module, name):
                    return globals().setdefault(name, getattr(module, name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


_HOMES = (
    "dutyfree.contract",
    "dutyfree.contract.errors",
    "dutyfree.contract.services",
    "dutyfree.substrates",
)
_MODULES = {
    "abilities": "dutyfree.contract.abilities",
    "contract": "dutyfree.contract",
    "errors": "dutyfree.contract.errors",
    "layers": "dutyfree.layers",
    "recipes": "dutyfree.recipes",
    "substrates": "dutyfree.substrates",
    "sync": "dutyfree.sync",
}
__version__ = "0.1.0"

__all__ = [
    "Action",
    "ActionError",
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
    "abilities",
    "errors",
    "layers",
    "open",
    "recipes",
    "sync",
]
