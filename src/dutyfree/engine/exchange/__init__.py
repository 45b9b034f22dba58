"""Copy layers between machines: pack, offer, fetch what is missing, verify. See docs/layers.md.

Start with ``protocol``: three requests (offer, pack, send) that every peer answers. ``fetcher`` copies from a
peer, ``peers`` asks several before a stage is built, ``server`` answers over TCP, ``layout`` reads and writes
exports, ``sources`` opens a peer by its address. May import ``images``, ``store``, ``launcher`` and ``host``.
"""
