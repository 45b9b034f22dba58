"""Adapters for other frameworks. Each is imported only by its framework, and nothing here imports them.

This room imports the contract, ``dutyfree.open`` and the recipes.
"""
