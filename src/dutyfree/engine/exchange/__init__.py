"""Copy layers between machines: pack, offer, fetch what is missing, verify. See docs/layers.md.

Start with ``protocol``: three requests (offer, pack, open_blob) that every peer answers. ``fetcher`` copies
from a peer, ``peers`` asks several before a stage is built, ``http_peer`` is a peer behind a server,
``distribution`` is what that server answers, ``layout`` reads and writes exports, ``sources`` opens a peer by
its address. May import ``images``, ``store``, ``launcher`` and ``host``.
"""
