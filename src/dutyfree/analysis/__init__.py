"""Analysis: from records to the numbers of a report, a comparison or an export.

::

    records → decomposition → cells → tax, ratios, projection, cautions → Summary

``model`` and ``findings`` have the types of a summary. May import ``study.records`` and the contract, and no substrate. Start with ``summary.summarise``;
``comparison.compare``, ``ab.compare_rounds`` and ``export.export`` are the other entry points.
``statistics`` has the only intervals and tests.
"""
