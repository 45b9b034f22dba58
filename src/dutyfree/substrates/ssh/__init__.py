"""The substrate ``ssh``: any machine that the ``ssh`` program reaches, one fresh directory per sandbox.

Start with ``substrate``. ``connection`` runs ``ssh`` and shares connections; ``errors`` reads what it says;
``guest`` is a sandbox behind our init, ``execution`` one with a session for each action. Nothing is isolated:
commands have the rights of the remote user. This room imports the contract, ``substrates.local``, and of
dutyfree's engine ``sandbox`` and the rooms below it.
"""

from dutyfree.substrates.ssh.config import SshConfig
from dutyfree.substrates.ssh.substrate import Ssh

__all__ = ["Ssh", "SshConfig"]
