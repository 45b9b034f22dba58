"""Layers on their way between machines: packed, offered, fetched where they are missing, verified.

The exchange, whatever carries it: *names that are wanted* → chains of layers → *layers that are missing* →
blobs → *blobs, each from where it was cut* → one stream. See docs/layers.md.
"""
