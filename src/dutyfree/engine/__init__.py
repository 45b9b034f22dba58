"""The rollout-native engine: isolated sandboxes at the speed of fork and exec.

``init/`` is one static C program with two roles: the *launcher*, which makes sandboxes, and *init*, the
first process in each of them. The modules here talk to both; ``substrates.native`` offers them under the
contract.
"""
