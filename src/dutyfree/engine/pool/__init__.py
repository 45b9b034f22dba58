"""The warm pool: leases, the scheduler that decides, and the executor that carries decisions out.

Start with ``pool``; ``scheduler`` decides without a clock and without I/O. This room imports ``sandbox`` and
the rooms below it.
"""
