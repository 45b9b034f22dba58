"""Reports: figures, tables, Markdown and HTML.

::

    Summary → figures, tables → document → report.md, report.html

May import ``analysis`` and ``study.records``, and no substrate. Start with ``document``, which has the
content of a report in order; ``files`` writes it.
"""
