"""Rows in: files, their blocks, the order of rows, the row filter. Never imports torch."""
