"""Programs that an agent may leave running; each makes a file ``ready`` when it has done its worst."""

from __future__ import annotations

FORK_BOMB = """
import os, time
while True:
    try:
        if os.fork() == 0: time.sleep(1000)
    except OSError:
        open("ready", "w")
        time.sleep(0.01)
"""
