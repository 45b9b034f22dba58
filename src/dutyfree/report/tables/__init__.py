"""The tables of a report: as text with cautions for people, as CSV with full numbers for programs.

May import ``analysis``, and ``palette`` and ``phrases`` of the report. ``catalog`` lists them in order.
"""
