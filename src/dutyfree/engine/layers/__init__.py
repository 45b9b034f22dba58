"""From recipes to the layers that sandboxes start from, and snapshots.

This room imports ``exchange``, ``images`` and the rooms below. Start with ``recipe_layers``, which opens the
image (``open_image``) and builds missing stages (``build``). ``start_state`` is what comes out;
``memory_layers`` and ``disk_bridge`` hold its layers, ``named_snapshots`` stores snapshots on disk.
"""
