"""This machine: what the engine requires and finds here, how many sandboxes fit, and which ones run.

This is the lowest room of the engine: it imports the contract only. Start with ``requirements``. ``census``
lists sandboxes for ``dutyfree ps``; ``proc`` reads /proc for all rooms.
"""
