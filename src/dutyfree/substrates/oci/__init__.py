"""The substrate ``oci``: one container of crun, runc or gVisor per sandbox, without an engine or a daemon.

Start with ``substrate``. ``runtime`` is what the three programs differ in; ``spec`` writes a container's
configuration with ``seccomp``; ``container`` makes, watches and removes one; ``groups`` are its control
groups. A container is a sandbox behind our init, or by ``execution``, with the runtime's own exec. ``gc``
removes leftovers. This room imports the contract, ``substrates.local``, ``study_image``, and dutyfree's
engine, which opens images and builds recipes.
"""

from dutyfree.substrates.oci.config import OciConfig
from dutyfree.substrates.oci.substrate import Oci

__all__ = ["Oci", "OciConfig"]
