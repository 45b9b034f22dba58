"""UNDERSTAND, from records alone."""
