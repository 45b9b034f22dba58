"""The Python side of the launcher, the C process that makes and ends sandboxes.

This room imports ``host`` only. Start with ``client``, which starts the launcher and sends requests.
``requirements`` says whether it can start here; ``protocol`` is ``init/protocol.h`` for Python. ``create``
makes a sandbox, ``handle`` freezes and ends it, ``network`` and ``network_policy`` control what it reaches.
"""
