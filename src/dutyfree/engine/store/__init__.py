"""The layer store: immutable directories on disk by key, shared by all processes of this machine.

Start with ``store``. ``layer_lease`` keeps a layer from being evicted, ``provenance`` records how it was
built, ``durability`` makes it survive a power cut, ``sweep`` removes what killed processes left. ``overlay``
and ``squash`` read layers as overlayfs shows them, ``cancel`` stops threads.
May import ``launcher`` and ``host``.
"""
