"""This machine: what the engine finds here, how many sandboxes fit, and which ones run.

This is the lowest room of the engine: it imports the contract only. Start with ``features``. ``census`` lists
sandboxes for ``dutyfree ps``; ``proc`` reads /proc for all rooms.
"""
