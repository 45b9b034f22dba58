"""Layers of recipes: content keys, building stages, layers in memory, and named snapshots on disk.

Start with ``build``; ``keys`` says which recipes are the same. This room imports ``images`` and the rooms
below it.
"""
