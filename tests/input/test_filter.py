"""The row filter: what it reads, what it lets through, and what it says when it cannot."""

from __future__ import annotations

import pyarrow as pa
import pytest

from pipeline.input.filter import FilterError, RowFilter
from pipeline.input.rows import Row
from pipeline.request import RowKey

BATCH = pa.record_batch(
    {
        "language": ["en", "de", None],
        "score": pa.array([0.9, 0.1, None]),
        "tags": pa.array([["a", "b"], [], None]),
        "range": [1, 2, 3],
    }
)


def row(index: int) -> Row:
    return Row(index, RowKey(3, 70 + index), BATCH, index)


def kept(expression: str) -> list[bool]:
    rows = RowFilter(expression, BATCH.schema.names)
    return [rows.keeps(row(index)) for index in range(3)]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("language == 'en'", [True, False, False]),
        ("language != 'en' and language is not none", [False, True, False]),
        ("score is not none and score > 0.5", [True, False, False]),
        ("'a' in (tags or [])", [True, False, False]),
        ("tags", [True, False, False]),
        ("(language or '') | upper in ['DE', '']", [False, True, True]),
        ("range >= 2", [False, True, True]),  # a column, not Jinja's function of that name
        ("language in ['en', 'de'] # a comment would not end it", None),
    ],
)
def test_rows_that_pass(expression: str, expected: list[bool] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match="is not a Jinja expression"):
            kept(expression)
    else:
        assert kept(expression) == expected


def test_it_knows_the_columns_it_reads() -> None:
    assert RowFilter("score > 1 and 'x' in tags", BATCH.schema.names).columns == ("score", "tags")


def test_other_columns_need_not_be_there() -> None:
    narrow = Row(0, RowKey(0, 0), BATCH.select(["language"]), 0)
    assert RowFilter("language == 'en'", BATCH.schema.names).keeps(narrow)


def test_a_column_that_does_not_exist_is_named_before_the_first_row() -> None:
    with pytest.raises(ValueError, match=r"source\.filter=.* asks for column lang, .*language, score"):
        RowFilter("lang == 'en'", BATCH.schema.names)


@pytest.mark.parametrize(
    "expression",
    ["language ==", "language }}{{ score", "language | nosuch", "{{ language }}", "", "score > 1)"],
)
def test_what_is_not_an_expression_names_the_setting(expression: str) -> None:
    with pytest.raises(ValueError, match=r"source\.filter="):
        RowFilter(expression, BATCH.schema.names)


@pytest.mark.parametrize("expression", ["true", "1 == 1"])
def test_a_filter_that_reads_nothing_is_a_mistake(expression: str) -> None:
    with pytest.raises(ValueError, match="reads no column"):
        RowFilter(expression, BATCH.schema.names)


def test_an_error_names_the_setting_and_the_row() -> None:
    rows = RowFilter("score > 0.5", BATCH.schema.names)
    assert rows.keeps(row(0))
    with pytest.raises(
        FilterError, match=r"source\.filter='score > 0\.5' failed on row 72 of file 3: TypeError"
    ):
        rows.keeps(row(2))


@pytest.mark.parametrize(
    "expression",
    [
        "language.__class__.__mro__",
        "tags.append('x')",
        "language.format.__globals__",
        "(tags or [language]).__class__.__base__.__subclasses__()",
    ],
)
def test_it_runs_in_a_sandbox(expression: str) -> None:
    rows = RowFilter(expression, BATCH.schema.names)
    with pytest.raises(FilterError, match="SecurityError|UndefinedError"):
        rows.keeps(row(0))
