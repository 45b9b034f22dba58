"""Substrates: one package or module for each, and the registry that finds them by name.

Start with ``registry``. ``toolkit`` is for authors of substrates; ``local`` has the parts that substrates on
this machine share. This room imports the contract and the engine, and nothing of the study.
"""

from dutyfree.substrates.registry import BUILT_IN, configure, names, open, probe, provider

__all__ = ["BUILT_IN", "configure", "names", "open", "probe", "provider"]
