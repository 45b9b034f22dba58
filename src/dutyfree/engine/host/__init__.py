"""This machine: what the engine needs of it, what it offers, its limits, and which sandboxes live on it.

Start with ``requirements``. The lowest room of the engine: it imports the contract alone.
"""
