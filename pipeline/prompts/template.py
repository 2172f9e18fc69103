"""Users' Jinja templates over a row's columns, in a sandbox.

Knows: the one Jinja environment of the project, which names in a template are columns, and how a
template's errors are said. Refuses to know: prompts, tokenizers, files. The chat template is not
rendered here: transformers has an environment of its own for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment


def _refuse_null(value: Any) -> Any:
    # Jinja would print the word None into the prompt, and nobody would see it among a million rows.
    if value is None:
        raise ValueError("a null value would be printed as 'None'; write e.g. {{ column or '' }}")
    return value


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_refuse_null)
    # JSONL columns without a declared type arrive as JSON text.
    environment.filters["fromjson"] = json.loads
    return environment


# Shared by prompt.template and source.filter. Rendering changes nothing in it, so threads may share it.
ENVIRONMENT = _environment()

# Jinja leaves out of its analysis the names it has as globals (range, dict, ...), which columns may have too.
_ANALYSIS = _environment()
_ANALYSIS.globals = {}


def template_columns(source: str, key: str, available: Sequence[str] | None = None) -> tuple[str, ...]:
    """The columns that a template reads, sorted.

    source: template text; wrap an expression in braces first. key: the setting, for errors.
    available: the input's columns; None when they are not known.
    Raises ValueError for a syntax error, or for a name that is neither a column nor one of Jinja's.
    """
    try:
        names = meta.find_undeclared_variables(_ANALYSIS.parse(source))
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        place = f" in line {line}" if line else ""
        raise ValueError(f"{key} is not a valid Jinja template{place}: {error}") from error
    known = () if available is None else available
    columns = sorted(name for name in names if name in known or name not in ENVIRONMENT.globals)
    require_columns(columns, key, available)
    return tuple(columns)


def require_columns(columns: Sequence[str], key: str, available: Sequence[str] | None) -> None:
    """Raises ValueError naming the key, the first column the input lacks, and those it has."""
    if available is None:
        return
    for column in columns:
        if column not in available:
            raise ValueError(
                f"{key} reads column {column!r}, which the input lacks; its columns are: "
                f"{', '.join(available) or '(none)'}"
            )


class RowTemplate:
    """A compiled template. `columns` are the input columns it reads."""

    def __init__(self, source: str, key: str, available: Sequence[str] | None = None) -> None:
        self.key = key
        self.columns = template_columns(source, key, available)
        try:
            self._template = ENVIRONMENT.from_string(source)
        except TemplateError as error:  # what only shows in compiling: an unknown filter or test
            raise ValueError(f"{key} is not a valid Jinja template: {error}") from error

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for one row's values. Raises ValueError naming the key."""
        try:
            return self._template.render(values)
        # A template may divide by zero or index a null: whatever it raises is this row's error.
        except Exception as error:
            nulls = [column for column in self.columns if values[column] is None]
            hint = f" (null in this row: {', '.join(nulls)})" if nulls else ""
            raise ValueError(f"{self.key}: {error}{hint}") from error
