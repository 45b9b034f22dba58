"""The warm pool: idle sandboxes kept ready for requests, within a budget.

Start with ``pool``. ``scheduler`` decides, ``executor`` carries the decisions out, ``source`` is the protocol
through which it creates sandboxes, ``native_source`` that of the native engine, ``leases`` the bookkeeping of
requests. This room imports ``sandbox`` and the rooms below it.
"""
