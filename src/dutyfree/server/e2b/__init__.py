"""The wire of E2B, so that its unmodified SDK uses this server (docs/service.md lists what is there).

``control`` has the API that creates and ends sandboxes, ``envd`` the one inside of a sandbox: processes and
files, as Connect RPC with JSON. ``connect`` is that encoding, ``processes`` the commands of one sandbox by
their numbers. This room may import what ``server`` imports.
"""
