"""Finished completions -> one record batch of the output.

Knows: where each column's values come from. Refuses to know: where batches go.

Shapes: R = rows, C = completion tokens of a row, K = alternatives per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from pipeline.output.schema import ERROR, OPTIONAL, OutputSchema
from pipeline.request import Completion, FinishReason

if TYPE_CHECKING:
    from pipeline.input.rows import Row


def gather(schema: OutputSchema, rows: Sequence[Row]) -> list[pa.Array]:
    """The carried columns of `rows`, one array [R] each, copied from Arrow to Arrow."""
    fields = schema.carried_fields
    if not rows:
        return [pa.array([], field.type) for field in fields]
    batches: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        batches.setdefault(id(row.batch), []).append(place)
    order = np.argsort(np.concatenate([np.asarray(places) for places in batches.values()]))
    taken = []
    for places in batches.values():
        indices = pa.array([rows[place].index for place in places], pa.int64())
        taken.append((rows[places[0]].batch, indices))
    columns = []
    for name, field in zip(schema.carried, fields, strict=True):
        pieces = [_plain(batch.column(name).take(indices), field.type) for batch, indices in taken]
        columns.append(pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces).take(pa.array(order)))
    return columns


def encode(schema: OutputSchema, completions: Sequence[Completion]) -> pa.RecordBatch:
    """One row per completion, in the given order. Each request's payload is a PromptRow."""
    columns: dict[str, pa.Array] = dict(_key_columns(completions))
    rows = [completion.request.payload.row for completion in completions]
    columns.update(zip(schema.carried.values(), gather(schema, rows), strict=True))
    columns.update(_made_columns(completions, schema.with_prompt))
    for name in OPTIONAL:
        position = schema.arrow.get_field_index(name)
        if position >= 0:
            columns[name] = _token_column(name, completions, schema.arrow.field(position).type)
    arrays = [columns[name] for name in schema.arrow.names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.arrow)


def _plain(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array if array.type.equals(kind) else array.cast(kind)


def _key_columns(completions: Sequence[Completion]) -> dict[str, pa.Array]:
    keys = [completion.request.key for completion in completions]
    return {
        "file": pa.array([key.file for key in keys], pa.int32()),
        "row": pa.array([key.row for key in keys], pa.int64()),
        "sample": pa.array([completion.sample for completion in completions], pa.int32()),
    }


def is_finished(completion: Completion) -> bool:
    return completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def _made_columns(completions: Sequence[Completion], with_prompt: bool) -> dict[str, pa.Array]:
    errors = [completion.error for completion in completions]
    tokens = [len(completion.token_ids) if is_finished(completion) else 0 for completion in completions]
    return {
        "prompt": _texts([c.request.prompt if with_prompt else None for c in completions]),
        "completion": _texts([c.text if is_finished(c) else None for c in completions]),
        "finish_reason": pa.array([c.finish_reason.value for c in completions], pa.string()),
        "error": pa.array(
            [None if e is None else {"code": _valid(e.code), "message": _valid(e.message)} for e in errors],
            ERROR,
        ),
        "prompt_tokens": pa.array([len(c.request.prompt_ids) for c in completions], pa.int32()),
        "completion_tokens": pa.array(tokens, pa.int32()),
        "prompt_truncated_tokens": pa.array(
            [c.request.payload.truncated_tokens for c in completions], pa.int32()
        ),
    }


def _texts(texts: list[str | None]) -> pa.Array:
    try:
        return pa.array(texts, pa.large_string())
    except UnicodeEncodeError:
        return pa.array([None if text is None else _valid(text) for text in texts], pa.large_string())


def _valid(text: str) -> str:
    """`text` with lone surrogates, which no UTF-8 has, as U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _token_column(name: str, completions: Sequence[Completion], kind: pa.DataType) -> pa.Array:
    """A list per row: of numbers [C], or of K numbers each [C, K]. Null where a row has no completion."""
    lists = [_token_values(name, completion) for completion in completions]
    present = [values for values in lists if values is not None]
    lengths = [0 if values is None else len(values) for values in lists]
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    mask = pa.array([values is None for values in lists], pa.bool_())
    inner = kind.value_type
    scalar = inner.value_type if pa.types.is_fixed_size_list(inner) else inner
    flat = np.concatenate([values.reshape(-1) for values in present]) if present else np.empty(0)
    values = pa.array(flat.astype(scalar.to_pandas_dtype(), copy=False), scalar)
    if inner is not scalar:
        assert len(values) == sum(lengths) * inner.list_size, (
            f"{name} has not {inner.list_size} values a token"
        )
        values = pa.FixedSizeListArray.from_arrays(values, type=inner)
    return pa.ListArray.from_arrays(offsets, values, type=kind, mask=mask)


def _token_values(name: str, completion: Completion) -> np.ndarray | None:
    if name == "prompt_ids":
        return completion.request.prompt_ids
    if not is_finished(completion):
        return None
    if name == "completion_ids":
        return completion.token_ids
    if name == "tail_mass":
        assert completion.topk_logprobs is not None, "the engine returned no alternatives"
        kept = np.exp(completion.topk_logprobs.astype(np.float64)).sum(axis=1)
        # rounding can put the sum a little above one
        return np.maximum(1.0 - kept, 0.0)
    values: np.ndarray | None = getattr(completion, name)
    assert values is not None, f"the engine returned no {name}"
    assert len(values) == len(completion.token_ids), f"{name} and token_ids differ in length"
    return values
