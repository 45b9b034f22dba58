"""``bare``: commands on the host itself, in a fresh directory. It is the baseline of every measured tax.

It isolates nothing: commands see the whole machine and have the caller's rights. They get a small fixed
environment, a working directory and a temporary directory. Both are removed, and the processes killed, when
the sandbox is closed. Start with ``substrate``. This room imports the contract, ``substrates.local`` and
``engine.layers.run_stage``.
"""

from dutyfree.substrates.bare.sandbox import BareSandbox
from dutyfree.substrates.bare.substrate import Bare, BareConfig

__all__ = ["Bare", "BareConfig", "BareSandbox"]
