"""The layer store: content keys to immutable directories on disk, shared by all processes of this machine.

Start with ``store``. Leases keep layers from being evicted, ``durability`` makes them survive a power cut,
``sweep`` removes what killed processes left. This room imports ``launcher`` and ``host``.
"""
