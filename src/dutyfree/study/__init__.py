"""MEASURE: plan → trial → records."""
