"""The output's columns: names, types, values, whatever the rows are."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
from fake_jobs import PARAMS, FakeSource, complete

from pipeline.config import OutputConfig, TopkDtype
from pipeline.input.order import RowOrder
from pipeline.input.rows import Row, read_rows
from pipeline.output.encode import encode, gather
from pipeline.output.schema import output_schema, plain_type
from pipeline.prompts.prompts import PromptRow
from pipeline.request import Completion, FinishReason, Request, RowError, RowKey

EVERYTHING = {"prompt_ids": True, "completion_ids": True, "logprobs": True, "topk": 2}


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    return [Row(i, RowKey(0, i), batch, i) for i in range(batch.num_rows)]


def completion(row: Row, reason: FinishReason = FinishReason.STOP, **values: object) -> Completion:
    prompt = values.pop("prompt", "p")
    request = Request(row.key, np.array([1, 2], np.int32), PARAMS, prompt=prompt, payload=PromptRow(row, 3))
    return Completion(request, 0, reason, **values)


def test_columns_come_in_order_with_the_promised_types():
    schema = output_schema(OutputConfig(dir="x", **EVERYTHING), pa.schema([("q", pa.string())])).arrow
    assert [(field.name, str(field.type)) for field in schema] == [
        ("file", "int32"),
        ("row", "int64"),
        ("sample", "int32"),
        ("q", "string"),
        ("prompt", "large_string"),
        ("completion", "large_string"),
        ("finish_reason", "string"),
        ("error", "struct<code: string, message: string>"),
        ("prompt_tokens", "int32"),
        ("completion_tokens", "int32"),
        ("prompt_truncated_tokens", "int32"),
        ("prompt_ids", "list<item: int32>"),
        ("completion_ids", "list<item: int32>"),
        ("logprobs", "list<item: float>"),
        ("topk_ids", "list<item: fixed_size_list<item: int32>[2]>"),
        ("topk_logprobs", "list<item: fixed_size_list<item: halffloat>[2]>"),
        ("tail_mass", "list<item: float>"),
    ]


def test_topk_can_be_float32():
    output = OutputConfig(dir="x", completion_ids=True, topk=3, topk_dtype=TopkDtype.float32)
    assert (
        output_schema(output, pa.schema([])).arrow.field("topk_logprobs").type.value_type.value_type
        == "float"
    )


def test_a_carried_column_never_takes_one_of_our_names():
    source = pa.schema(
        [(name, pa.int8()) for name in ("prompt", "input_prompt", "logprobs", "input_row", "row")]
    )
    schema = output_schema(OutputConfig(dir="x"), source)
    assert dict(schema.carried) == {
        "prompt": "input_input_prompt",
        "input_prompt": "input_prompt",
        "logprobs": "input_logprobs",
        "input_row": "input_row",
        "row": "input_input_row",
    }
    assert len(set(schema.arrow.names)) == len(schema.arrow.names)


def test_a_missing_column_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"output\.columns=\['x'\] names 'x'.*it has a, b"):
        output_schema(OutputConfig(dir="x", columns=["x"]), pa.schema([("a", pa.int8()), ("b", pa.int8())]))


def test_an_input_without_columns_has_nothing_to_carry():
    assert not output_schema(OutputConfig(dir="x", columns=["x"]), pa.schema([])).carried


def test_no_columns_may_be_carried():
    assert not output_schema(OutputConfig(dir="x", columns=[]), pa.schema([("a", pa.int8())])).carried


def test_carried_values_keep_their_types_null_or_not_at_first():
    """A column that is null in the first rows and a number later is one column of one type."""
    source = FakeSource(((3, 2000),))
    index = source.scan()
    schema = output_schema(OutputConfig(dir="x", columns=["score", "tags", "kind"]), index.schema)
    order = RowOrder(index.blocks)
    rows = list(read_rows(source, order, [range(order.num_rows)], list(schema.carried)))
    first = encode(schema, [complete(row, 0) for row in rows[:3]])
    later = encode(schema, [complete(row, 0) for row in rows[3:]])
    assert first.column("score").null_count == 3 and first.column("score").type == pa.float64()
    assert later.column("score")[3].as_py() == 3.0
    assert later.schema.equals(first.schema)
    assert later.column("tags")[0].as_py() == ["a", "text 0/3"]
    assert later.column("kind").type == pa.string()


def test_gather_follows_the_rows_across_batches():
    batches = [pa.record_batch({"x": pa.array([10 * b, 10 * b + 1, None], pa.int16())}) for b in range(3)]
    rows = [row for batch in batches for row in rows_of(batch)]
    schema = output_schema(OutputConfig(dir="x"), batches[0].schema)
    picked = [rows[i] for i in (7, 0, 8, 4, 3, 1)]
    assert gather(schema, picked)[0].equals(pa.array([21, 0, None, 11, 10, 1], pa.int16()))


def test_dictionaries_are_undone_at_any_depth():
    inner = pa.dictionary(pa.int8(), pa.string())
    nested = pa.struct([("a", pa.list_(inner)), ("b", pa.list_(inner, 2)), ("c", pa.large_list(pa.int8()))])
    assert plain_type(nested) == pa.struct(
        [("a", pa.list_(pa.string())), ("b", pa.list_(pa.string(), 2)), ("c", pa.large_list(pa.int8()))]
    )
    values = pa.array([["u", "v"], ["u"], None], pa.list_(pa.string())).cast(pa.list_(inner))
    batch = pa.record_batch({"t": values})
    schema = output_schema(OutputConfig(dir="x"), batch.schema)
    assert gather(schema, rows_of(batch))[0].to_pylist() == [["u", "v"], ["u"], None]


def test_token_columns_hold_flat_lists_and_null_where_nothing_was_made():
    row, other, third = rows_of(pa.record_batch({"q": pa.array(["a", "b", "c"])}))
    schema = output_schema(OutputConfig(dir="x", **EVERYTHING), row.batch.schema)
    made = completion(
        row,
        text="t",
        token_ids=np.array([5, 2], np.int32),
        logprobs=np.array([-0.5, -1.0], np.float32),
        topk_ids=np.array([[5, 6], [2, 7]], np.int32),
        topk_logprobs=np.log(np.array([[0.5, 0.25], [0.7, 0.3]], np.float32)),
    )
    error = completion(other, FinishReason.ERROR, error=RowError("c", "m"), token_ids=np.array([1], np.int32))
    batch = encode(schema, [error, made, completion(third, FinishReason.SKIPPED)])
    assert batch.column("completion_ids").to_pylist() == [None, [5, 2], None]
    assert batch.column("topk_ids").to_pylist() == [None, [[5, 6], [2, 7]], None]
    assert batch.column("tail_mass")[1].as_py() == pytest.approx([0.25, 0.0], abs=1e-6)
    assert min(batch.column("tail_mass")[1].as_py()) >= 0
    assert batch.column("prompt_ids").to_pylist() == [[1, 2]] * 3
    assert batch.column("completion_tokens").to_pylist() == [0, 2, 0]
    assert batch.column("finish_reason").to_pylist() == ["error", "stop", "skipped"]
    assert batch.column("error").to_pylist() == [{"code": "c", "message": "m"}, None, None]
    assert batch.column("prompt_truncated_tokens").to_pylist() == [3, 3, 3]


def test_text_that_no_utf8_has_becomes_the_replacement_character():
    (row,) = rows_of(pa.record_batch({"q": pa.array(["a"])}))
    schema = output_schema(OutputConfig(dir="x"), row.batch.schema)
    batch = encode(schema, [completion(row, text="a\ud83db", prompt="\ud83d\ude00")])
    assert batch.column("completion").to_pylist() == ["a\ufffdb"]
    assert batch.column("prompt").to_pylist() == ["\U0001f600"]


def test_the_prompt_is_null_if_it_is_not_wanted():
    (row,) = rows_of(pa.record_batch({"q": pa.array(["a"])}))
    schema = output_schema(OutputConfig(dir="x", prompt=False), row.batch.schema)
    assert encode(schema, [completion(row, text="t")]).column("prompt").to_pylist() == [None]


def test_what_datasets_knows_of_a_carried_column_goes_along():
    features = {"info": {"features": {"c": {"names": ["no", "yes"], "_type": "ClassLabel"}, "d": {}}}}
    source = pa.schema([("c", pa.int64())], metadata={"huggingface": json.dumps(features)})
    metadata = output_schema(OutputConfig(dir="x"), source, {"version": "1"}).arrow.metadata
    assert json.loads(metadata[b"huggingface"])["info"]["features"] == {
        "c": features["info"]["features"]["c"]
    }
    assert json.loads(metadata[b"tokenmill"]) == {"version": "1"}
