"""Adapters to other people's frameworks, each imported only by its framework."""
