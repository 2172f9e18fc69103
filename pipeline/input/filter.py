"""The row filter: a sandboxed Jinja expression over a row's columns.

Knows: which columns the expression reads and whether it holds for a row.
Refuses to know: what becomes of a row that does not pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pipeline.input.rows import Row


class FilterError(ValueError):
    """The filter failed on one row; the message names the setting, the row and the reason."""


class RowFilter:
    """`source.filter`, ready to be asked. `columns`: those it reads.

    Raises ValueError for an expression that cannot be parsed, reads a column that is not among
    `available`, or reads none.
    """

    def __init__(self, expression: str, available: Iterable[str]):
        self.expression = expression
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        # Jinja's own globals (range, dict, lipsum) would hide the columns of these names.
        environment.globals.clear()
        try:
            # Parsed as an expression first: put between braces, "a }}{{ b" would pass for one.
            self._holds = environment.compile_expression(expression, undefined_to_none=False)
            names = meta.find_undeclared_variables(environment.parse("{{ (" + expression + "\n) }}"))
        except TemplateError as error:
            raise ValueError(f"source.filter={expression!r} is not a Jinja expression: {error}") from error
        known = list(available)
        missing = sorted(names.difference(known))
        if missing:
            raise ValueError(
                f"source.filter={expression!r} asks for column {', '.join(missing)}, which the input does "
                f"not have: its columns are {', '.join(known) or 'none'}"
            )
        if not names:
            raise ValueError(
                f"source.filter={expression!r} reads no column, so it is the same for every row: "
                "name a column in it, or set source.filter=null"
            )
        self.columns = tuple(sorted(names))

    def keeps(self, row: Row) -> bool:
        """Whether the row passes. Raises FilterError if the expression fails on it."""
        try:
            return bool(self._holds(**row.values(self.columns)))
        # An expression can raise whatever a column's values can: a row's error must never end a job.
        except Exception as error:
            raise FilterError(
                f"source.filter={self.expression!r} failed on row {row.key.row} of file {row.key.file}: "
                f"{type(error).__name__}: {error}"
            ) from error
