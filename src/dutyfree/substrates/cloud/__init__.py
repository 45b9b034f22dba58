"""The substrate ``cloud``: a fresh instance of a cloud for each sandbox, reached by the substrate ``ssh``.

Start with ``substrate``. ``api`` is what a provider must do, and ``ec2`` does it with libcloud; ``instances``
creates and ends them; ``user_data`` is what an instance does at its boot; ``watcher`` is a process that ends
the instances of a killed owner, and ``leftovers`` finds what remains after that. This room imports the
contract, ``substrates.ssh``, ``substrates.local``, and of dutyfree's engine ``sandbox`` and the rooms below.
"""

from dutyfree.substrates.cloud.config import CloudConfig
from dutyfree.substrates.cloud.substrate import Cloud

__all__ = ["Cloud", "CloudConfig"]
