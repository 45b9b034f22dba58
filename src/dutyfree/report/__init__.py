"""SHOW: figures, tables, Markdown and HTML, from records alone."""
