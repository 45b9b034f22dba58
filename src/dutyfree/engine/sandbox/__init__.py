"""One sandbox from its owner's side: the channel to its init, and every action on it.

Start with ``sandbox``, then ``channel``. This room imports ``layers`` and the rooms below it.
"""
