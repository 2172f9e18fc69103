"""What a row of output looks like: the columns, their Arrow types and their order.

Knows: how configuration and input fix all of them before the first token. Refuses to know: values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.config import OutputConfig, TopkDtype

PROVENANCE = b"tokenmill"
_FEATURES = b"huggingface"
_KEY = (("file", pa.int32()), ("row", pa.int64()), ("sample", pa.int32()))
ERROR = pa.struct([("code", pa.string()), ("message", pa.string())])
_MADE = (
    ("prompt", pa.large_string()),
    ("completion", pa.large_string()),
    ("finish_reason", pa.string()),
    ("error", ERROR),
    ("prompt_tokens", pa.int32()),
    ("completion_tokens", pa.int32()),
    ("prompt_truncated_tokens", pa.int32()),
)
OPTIONAL = ("prompt_ids", "completion_ids", "logprobs", "topk_ids", "topk_logprobs", "tail_mass")
# All of our names, also those not written now: a column is called the same whatever else is switched on.
RESERVED = frozenset(name for name, _ in (*_KEY, *_MADE)).union(OPTIONAL)


@dataclass(frozen=True)
class OutputSchema:
    """The Arrow schema of the output, and which input column each carried column comes from."""

    arrow: pa.Schema
    # output name by input name, in the order of the output
    carried: Mapping[str, str]
    # whether the column `prompt` holds the text, or nulls
    with_prompt: bool

    @property
    def carried_fields(self) -> list[pa.Field]:
        return [self.arrow.field(name) for name in self.carried.values()]


def output_schema(
    output: OutputConfig, source: pa.Schema, provenance: Mapping[str, Any] | None = None
) -> OutputSchema:
    """The schema of a job's output: keys, carried input columns, what was made.

    source: the schema of all input columns. provenance: goes into the schema's metadata as JSON.
    Raises ValueError if output.columns names a column that the input lacks.
    """
    carried = carried_columns(output, source)
    names = _output_names(carried)
    fields = [pa.field(name, kind) for name, kind in _KEY]
    for name in carried:
        field = source.field(name)
        fields.append(field.with_name(names[name]).with_type(plain_type(field.type)))
    fields += [pa.field(name, kind) for name, kind in _MADE]
    fields += [pa.field(name, kind) for name, kind in _optional_types(output).items()]
    metadata = {PROVENANCE: json.dumps(provenance or {}, sort_keys=True, ensure_ascii=False).encode()}
    features = _carried_features(source, names)
    if features:
        metadata[_FEATURES] = json.dumps({"info": {"features": features}}).encode()
    return OutputSchema(pa.schema(fields, metadata=metadata), names, output.prompt)


def carried_columns(output: OutputConfig, source: pa.Schema) -> list[str]:
    """Input columns that go into the output. Raises ValueError naming output.columns."""
    if output.columns is None or not source.names:
        # an empty JSONL file has no rows and so no columns; that is no mistake
        return list(source.names)
    for name in output.columns:
        if name not in source.names:
            raise ValueError(
                f"output.columns={output.columns} names {name!r}, which the input lacks; "
                f"it has {', '.join(source.names) or 'no columns'}"
            )
    return list(dict.fromkeys(output.columns))


def _output_names(carried: Sequence[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    taken = RESERVED.union(name for name in carried if name not in RESERVED)
    for name in carried:
        new = name
        while new in RESERVED or (new != name and new in taken):
            new = f"input_{new}"
        taken = taken.union([new])
        names[name] = new
    return names


def plain_type(kind: pa.DataType) -> pa.DataType:
    """`kind` without dictionary encoding, at any depth.

    A dictionary belongs to a file, not to a row: the same rows would look different after an
    interruption, and `datasets` opens no dictionary columns at all.
    """
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(kind.field(i)) for i in range(kind.num_fields)])
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))


def _optional_types(output: OutputConfig) -> dict[str, pa.DataType]:
    ids = pa.list_(pa.int32())
    wanted: dict[str, pa.DataType] = {}
    if output.prompt_ids:
        wanted["prompt_ids"] = ids
    if output.completion_ids:
        wanted["completion_ids"] = ids
    if output.logprobs:
        wanted["logprobs"] = pa.list_(pa.float32())
    if output.topk:
        value = pa.float16() if output.topk_dtype is TopkDtype.float16 else pa.float32()
        wanted["topk_ids"] = pa.list_(pa.list_(pa.int32(), output.topk))
        wanted["topk_logprobs"] = pa.list_(pa.list_(value, output.topk))
        wanted["tail_mass"] = pa.list_(pa.float32())
    return wanted


def _carried_features(source: pa.Schema, names: Mapping[str, str]) -> dict[str, Any]:
    """What `datasets` knows of the carried columns beyond Arrow (names of classes, images, …)."""
    try:
        known = json.loads((source.metadata or {})[_FEATURES])["info"]["features"]
        return {new: known[old] for old, new in names.items() if old in known}
    except (KeyError, TypeError, ValueError):
        return {}
