"""UNDERSTAND, from records alone: ``summary.summarise``, ``comparison.compare``, ``export.export``.

::

    records → decomposition → cells → tax, ratios, projection, cautions → Summary
"""
