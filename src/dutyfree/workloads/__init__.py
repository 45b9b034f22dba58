"""WHAT runs: the tiers T0, T1, T2 and the trajectories, the same on every substrate."""
