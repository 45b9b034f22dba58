"""The scheduler: which sandbox serves which request, what to refill, what to evict.

It is deterministic, with no clock and no I/O: the caller passes the time, and carries the operations out.
Start with ``decide``; ``state`` takes the events, ``values`` has the words for both directions. This room
imports ``contract`` only.
"""
