"""One sandbox from its owner's side.

Start with ``init_sandbox``: commands and files of any sandbox whose PID 1 is our init. It is composed of
parts, and each part has a module of its own. ``sandbox`` adds what only ``NativeSandbox`` can do. All parts
send requests to init through ``channel``, or through ``stream_channel`` in a container of another runtime.
``factory`` creates native sandboxes. This room imports ``layers`` and the rooms below it.
"""
