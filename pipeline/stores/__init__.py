"""Stores other than the files of this machine's own file systems."""
