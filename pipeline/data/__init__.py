"""Rows in, completions out: sources, order, prompts, parts, journals. Never imports torch."""
