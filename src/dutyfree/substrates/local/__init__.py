"""Parts that several substrates share: commands on this host, files by commands, owners, ids, the reaper.

Start with ``command``. ``reaper`` also runs as a process of its own. This room imports the contract and
``engine.host.proc``.
"""
