"""Recipes: functions that make common stages, and recipes from TOML files (docs/recipes.md).

Start with ``stages``. ``toml`` reads files; ``zygote`` is a Python program that runs in a sandbox and forks
for each call. This room imports the contract and ``dutyfree.validation``.
"""

from dutyfree.recipes.stages import apt, checkout, command, npm, pin, pip, python, repository
from dutyfree.recipes.toml import load

__all__ = ["apt", "checkout", "command", "load", "npm", "pin", "pip", "python", "repository"]
