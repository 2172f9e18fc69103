"""Arrow types from the words people write in a configuration, and nothing else.

    type    = name | "list<" field ">" | "large_list<" field ">" | "struct<" name ":" type, … ">"
    field   = [ "item:" ] type

The names are pyarrow's own (`string`, `int32`, `float64`, `bool`, `date32`, `timestamp[us]`, …), and
so is the nested form: what pyarrow prints for a type reads back as that type.
"""

from __future__ import annotations

import re

import pyarrow as pa

_TOKEN = re.compile(r"\s*([<>,:]|[^<>,:\s\[]+(?:\[[^\]]*\])?)")


def parse_type(text: str) -> pa.DataType:
    """The type that `text` names. Raises ValueError, saying what was not understood."""
    tokens = _TOKEN.findall(text)
    if "".join(tokens) != re.sub(r"\s", "", text):
        raise ValueError(f"{text!r} is not an Arrow type")
    parsed = _type(tokens)
    if tokens:
        raise ValueError(f"{''.join(tokens)!r} is left over after the type {parsed}")
    return parsed


def _type(tokens: list[str]) -> pa.DataType:
    name = _take(tokens)
    if name in ("list", "large_list"):
        _take(tokens, "<")
        if tokens[1:2] == [":"]:  # pyarrow prints the items' name: list<item: string>
            del tokens[:2]
        item = _type(tokens)
        _take(tokens, ">")
        return pa.list_(item) if name == "list" else pa.large_list(item)
    if name == "struct":
        _take(tokens, "<")
        fields: list[tuple[str, pa.DataType]] = []
        while not fields or tokens[:1] == [","]:
            if fields:
                _take(tokens, ",")
            field = _take(tokens)
            _take(tokens, ":")
            fields.append((field, _type(tokens)))
        _take(tokens, ">")
        return pa.struct(fields)
    try:
        return pa.type_for_alias(name)
    except ValueError:
        raise ValueError(
            f"{name!r} is not an Arrow type: use e.g. string, int64, float64, bool, list<string> "
            "or struct<role: string, content: string>"
        ) from None


def _take(tokens: list[str], expected: str | None = None) -> str:
    token = tokens.pop(0) if tokens else "the end"
    if expected is not None and token != expected:
        raise ValueError(f"{token} stands where {expected} belongs")
    return token
