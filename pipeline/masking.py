"""Keeps passwords out of what people and log files get to see.

Knows: how `storage_options` look in YAML and in overrides. Text in, text out, so that the same rule
covers dumps, logs and error messages, whoever wrote them. `${oc.env:NAME}` is not a secret and stays.
"""

from __future__ import annotations

import logging
import re

MASK = "***"
# To the end of the line: a value may hold braces and quotes of its own, and too much hidden is no harm.
_ASSIGNED = re.compile(r"(storage_options(?:\.[^\s=:]+)?['\"]?\s*[=:])(.*)")
_HARMLESS = re.compile(r"^['\"]?(null|\{\}|\$\{oc\.env:[^{}]*\})['\"]?$")


def mask(text: str) -> str:
    """`text` with what storage_options hold replaced, in YAML and in overrides.

    What is indented below such a line is its continuation (a block, a folded string) and left out.
    """
    lines: list[str] = []
    hidden_below: int | None = None
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if hidden_below is not None and (indent > hidden_below or not line.strip()):
            continue
        hidden_below = None
        assigned = _ASSIGNED.search(line)
        if assigned and not _HARMLESS.match(assigned[2].strip()):
            hidden_below = indent
            line = line[: assigned.end(1)] + _in_place(line, assigned[1])
        lines.append(line)
    return "\n".join(lines) + ("\n" if hidden_below is not None and text.endswith("\n") else "")


def _in_place(line: str, head: str) -> str:
    """The mask as it stands after `head`, so that what was YAML stays YAML."""
    if head.endswith(":"):
        return f" '{MASK}'"
    opening = line.lstrip(" -")[:1]
    return MASK + (opening if opening in ("'", '"') else "")


class MaskingFormatter(logging.Formatter):
    """What conf/config.yaml has hydra's and our own log lines pass through."""

    def format(self, record: logging.LogRecord) -> str:
        return mask(super().format(record))
