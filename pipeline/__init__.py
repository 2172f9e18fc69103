"""Tokenmill: batch offline generation. Read `pipeline/job.py` first: it holds the whole flow."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["open_parts"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `import pipeline.config` needs neither Arrow nor anything else.
    if name == "open_parts":
        from pipeline.output.reader import open_parts

        return open_parts
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
