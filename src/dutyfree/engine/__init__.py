"""The native engine: isolated sandboxes on this host, at about the speed of fork and exec.

Its rooms, each of which imports only those before it: ``host``, ``launcher``, ``store``, ``images``,
``exchange``, ``layers``, ``sandbox``, ``pool``. ``node`` wires them together: start there. ``init/`` is the C
program, which is launcher, init and egress process. The engine imports no substrate.
"""
