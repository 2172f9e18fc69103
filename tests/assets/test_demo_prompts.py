"""The demo's input is what its generator makes, and has an answer for all but the stories."""

from __future__ import annotations

import runpy

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.schema_store import ASSETS


def test_the_file_is_what_the_generator_makes():
    made = runpy.run_path(str(ASSETS / "make_demo_prompts.py"))["demo_prompts"]()
    assert made.equals(pq.read_table(ASSETS / "demo_prompts.parquet"))


def test_only_stories_have_no_right_answer():
    table = pq.read_table(ASSETS / "demo_prompts.parquet")
    assert table.schema.names == ["id", "kind", "prompt", "expected"]
    assert all(field.type == pa.string() for field in table.schema)
    assert {row["kind"] for row in table.to_pylist() if row["expected"] is None} == {"story"}
    assert len(set(table["id"].to_pylist())) == table.num_rows == 300


def test_there_are_several_row_groups_to_resume_at():
    assert pq.ParquetFile(ASSETS / "demo_prompts.parquet").num_row_groups > 3
