"""The figures of a report: functions of the summary.

May import ``analysis``, and ``canvas``, ``palette`` and ``phrases`` of the report. ``catalog`` lists them.
A figure without data shows a message. Figures that only some studies can have are None without it.
"""
