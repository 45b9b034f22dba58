"""Carry out the calls of clients: one function for each call of ``wire.calls.CALLS``, by its name.

Start with ``registry``: the table, and the context of a call. The other modules hold the calls by subject.
They register them when this package is imported. ``item_pipe`` moves the bytes of a call through a pipe. This
room imports the contract, ``wire``, ``engine`` and the rest of the server except its routes.
"""

from dutyfree.server.handlers import commands, creation, files, node, processes, sandbox, services
from dutyfree.server.handlers.registry import HANDLERS, Context, DirectCall, Handler

__all__ = [
    "HANDLERS",
    "Context",
    "DirectCall",
    "Handler",
    "commands",
    "creation",
    "files",
    "node",
    "processes",
    "sandbox",
    "services",
]
