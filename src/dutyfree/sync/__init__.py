"""The blocking interface: the same objects, with each call run on an event loop in its own thread.

>>> with dutyfree.sync.open("bare") as substrate, substrate.sandbox() as sandbox:
...     sandbox.exec("echo hello").stdout

One generic wrapper serves all objects, so it has every method of the async ones: it awaits awaitables, async
context managers become context managers, async iterators become iterators, and it wraps results in the same
way. Any thread may call. A thread with an event loop may call too, but its loop stops until the call returns.

``wrapper`` has the wrapper, ``types`` the types of the wrapped objects, for annotations, type checkers and
``isinstance``. This room imports the contract and the registry; ``types`` also names types of the engine, for
type checkers only.
"""

from dutyfree.sync.wrapper import open

__all__ = ["open"]
