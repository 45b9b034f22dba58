"""The service: one process that gives the sandboxes of this host to clients elsewhere (docs/service.md).

Start with ``service``, which wires a native engine, the tenants and the sandboxes that they hold.
``handlers`` carries out calls, ``channel`` is the WebSocket on which they come, ``app`` the HTTP routes,
``layers`` the registry for other nodes, ``listen`` the sockets. This room imports the contract, ``wire``,
``engine`` and ``substrates.native``.
"""
