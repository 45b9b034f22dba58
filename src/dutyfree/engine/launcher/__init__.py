"""The Python side of the launcher, the C process that makes and ends sandboxes.

This room imports ``host`` only. Start with ``client``, which starts the launcher and sends requests;
``protocol`` is ``init/protocol.h`` for Python. ``create`` creates a sandbox, ``handle`` freezes and ends one,
``network`` and ``network_policy`` control what it reaches.
"""
