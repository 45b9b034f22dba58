"""What substrates on this machine share: commands, the reaper, owners, edits, lifecycles.

Start with ``command``. This room imports the contract alone.
"""
