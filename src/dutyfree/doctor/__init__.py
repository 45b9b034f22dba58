"""Check what this machine offers to dutyfree: what works, what is missing, and the remedy.

Start with ``check``: all checks, with those of the study; ``native`` checks what the native engine needs.
This room imports the registry, the engine and the study.
"""
