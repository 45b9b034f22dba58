"""The substrate ``vm``: a virtual machine of QEMU for each sandbox.

Start with ``substrate``. ``kernel`` fetches a kernel and packs our init with its modules; ``disks`` makes
disks of the engine's layers; ``accelerator`` finds out whether KVM works; ``qemu`` runs one QEMU; ``machine``
boots or restores a machine up to our init; ``resource_cache`` keeps what machines share; ``sshd`` is for
actions over ssh. This room imports the contract, ``substrates.local``, ``substrates.ssh``,
``substrates.native``, and dutyfree's engine.
"""

from dutyfree.substrates.vm.config import VmConfig
from dutyfree.substrates.vm.substrate import Vm

__all__ = ["Vm", "VmConfig"]
