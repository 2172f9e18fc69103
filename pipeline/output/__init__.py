"""Completions out: parts, journals, resume, proof and the finished dataset. Never imports torch."""
