"""One sandbox from its owner's side.

Start with ``sandbox``: ``NativeSandbox`` is composed of parts, and each part has a module of its own. All of
them send requests to the sandbox's init through ``channel``. ``factory`` creates sandboxes.
This room imports ``layers`` and the rooms below it.
"""
