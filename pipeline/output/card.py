"""The README.md of a finished dataset: what it is, from what it was made, how to open it.

Knows: Markdown, and the front matter by which a dataset hub finds the files. Pure: values in, text out.
"""

from __future__ import annotations

import json

import pyarrow as pa

from pipeline.output.dataset import DatasetFormat
from pipeline.output.plan import JobPlan

_FRONT = """---
configs:
- config_name: default
  data_files: "{pattern}"
tags:
- synthetic
---
"""
_ARROW = """```python
import datasets

dataset = datasets.load_from_disk("path/of/this/folder")
```
"""
_PARQUET = """```python
import pyarrow.parquet

table = pyarrow.parquet.read_table("path/of/this/folder/parquet")
```
"""


def card(
    plan: JobPlan, form: DatasetFormat, num_rows: int, schema: pa.Schema, partial: bool, drop_failed: bool
) -> str:
    pattern = "data-*.arrow" if form is DatasetFormat.arrow else "parquet/*.parquet"
    opening = "" if form is DatasetFormat.parquet else _ARROW
    opening += "" if form is DatasetFormat.arrow else _PARQUET
    notes = [f"{num_rows:,} rows, {plan.samples} per row of the input, in the order of the input."]
    if partial:
        notes.append("**Partial**: made before the job was complete.")
    if drop_failed:
        notes.append("Rows that ended as errors or were skipped are left out.")
    columns = "\n".join(f"| `{field.name}` | `{field.type}` |" for field in schema)
    made = {**plan.provenance, **plan.fingerprint}
    settings = json.dumps(made, indent=1, sort_keys=True, ensure_ascii=False)
    return (
        _FRONT.format(pattern=pattern)
        + "\n# Completions made with Tokenmill\n\n"
        + "\n".join(notes)
        + f"\n\n## Opening it\n\n{opening}"
        + f"\n## Columns\n\n| column | Arrow type |\n| --- | --- |\n{columns}\n"
        + f"\n## How it was made\n\n```json\n{settings}\n```\n"
    )
