"""Recipes: the helpers that make their stages, and their form as TOML files (docs/recipes.md).

Start with ``stages``; ``toml`` reads files, ``zygote`` is the Python program that runs inside a sandbox and
forks for each call. This room imports the contract alone.
"""

from dutyfree.recipes.stages import apt, checkout, command, npm, pin, pip, python, repository
from dutyfree.recipes.toml import load

__all__ = ["apt", "checkout", "command", "load", "npm", "pin", "pip", "python", "repository"]
