"""Analysis: from records to the numbers of a report, a comparison or an export.

::

    records → decomposition → cells → tax, ratios, law, projection, cautions → Summary

May import ``study.records`` and the contract, and no substrate. Start with ``summary.summarise``;
``comparison.compare``, ``ab.compare_rounds`` and ``export.export`` are the other entry points.
``model`` and ``findings`` have the types of a summary.
"""
