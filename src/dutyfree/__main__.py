"""``python -m dutyfree``."""

from dutyfree.cli import main

main()
