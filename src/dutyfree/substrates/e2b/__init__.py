"""The substrate ``e2b``: sandboxes of E2B, or of a server that speaks its wire, through E2B's own SDK.

Start with ``substrate``. ``sandbox`` has the contract and its abilities, ``execution`` one command,
``errors`` what the errors of the SDK mean here. This room imports the contract, the parts of ``local``, and
the package e2b when it is used.
"""

from dutyfree.substrates.e2b.substrate import E2B

__all__ = ["E2B"]
