"""The substrate ``daytona``: sandboxes of Daytona, through its own SDK. Never run against Daytona.

Start with ``substrate``. ``sandbox`` has the contract, ``execution`` one command, ``wrapper`` the shell code
around it and how its output is read, ``request`` what a sandbox is created with, ``errors`` what the errors
of the SDK mean here. This room imports the contract, the parts of ``local``, and the package daytona when it
is used.
"""

from dutyfree.substrates.daytona.substrate import Daytona

__all__ = ["Daytona"]
