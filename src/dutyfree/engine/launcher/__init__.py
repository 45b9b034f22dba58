"""The Python side of the launcher, the C process that makes and ends sandboxes.

``client`` starts it and sends requests, ``protocol`` has the wire format (``init/protocol.h`` for Python),
``create`` makes a sandbox, ``handle`` freezes and ends one. This room imports ``host``.
"""
