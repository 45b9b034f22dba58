"""The study: plan → trial → records.

May import substrates and workloads. Of ``analysis`` it uses the interval of a median, to stop a cell early.
Start with ``runner.run``; ``plan`` says what runs and in which order, ``workers`` starts a process per
substrate (``worker``), ``trial`` is the measured path, ``records`` is the file.
"""
