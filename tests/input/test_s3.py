"""Sources read from an object store, over HTTP: the same rows, and no more bytes than are wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.json
import pyarrow.parquet as pq
import pytest
from s3_server import S3Server

from pipeline.config import ArrowSource, JsonlSource, ParquetSource, SourceConfig
from pipeline.input.source import open_source

NUM_ROWS, GROUP = 3000, 1000


def table() -> pa.Table:
    texts = [f"{number:06d} " + f"{number * 2654435761 % 2**32:08x}" * 20 for number in range(NUM_ROWS)]
    return pa.table({"id": range(NUM_ROWS), "text": texts})


def write_parquet(path: Path) -> None:
    pq.write_table(table(), path, row_group_size=GROUP, compression="none")


def write_jsonl(path: Path) -> None:
    rows = table().to_pylist()
    path.write_text("".join(f'{{"id": {row["id"]}, "text": "{row["text"]}"}}\n' for row in rows))


def write_arrow(path: Path) -> None:
    with pa.ipc.new_file(str(path), table().schema) as writer:
        writer.write_table(table(), max_chunksize=GROUP)


KINDS = {"parquet": (ParquetSource, write_parquet), "jsonl": (JsonlSource, write_jsonl)}
KINDS["arrow"] = (ArrowSource, write_arrow)


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_on_s3_gives_its_rows_block_by_block(
    kind: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Callable[..., SourceConfig]
    config, write = KINDS[kind]
    write(tmp_path / f"a.{kind}")
    s3.files.put(str(tmp_path / f"a.{kind}"), f"{s3.bucket}/data/a.{kind}")
    # what is given as options needs no environment
    for name in s3.environment:
        monkeypatch.delenv(name)
    url = f"s3://{s3.bucket}/data/*.{kind}"
    source = open_source(config(path=url, storage_options=s3.options))
    index = source.scan()
    assert [file.path for file in index.files] == [f"s3://{s3.bucket}/data/a.{kind}"]
    rows = [
        row
        for block in index.blocks
        for batch in source.read(block, ["id", "text"])
        for row in batch.to_pylist()
    ]
    # JSON may have other types further on, so there a number is its text
    assert [{**row, "id": int(row["id"])} for row in rows] == table().to_pylist()
    source.check(index)
    size = (tmp_path / f"a.{kind}").stat().st_size
    if kind != "jsonl":
        before = s3.bytes_sent
        last = [batch.to_pylist() for batch in source.read(index.blocks[-1], ["id"])]
        assert last[-1][-1] == {"id": NUM_ROWS - 1}
        assert s3.bytes_sent - before < size / 2
    # the same file, replaced by another one: seen, not read as if it were the old one
    s3.files.pipe_file(f"{s3.bucket}/data/a.{kind}", b"x" * size)
    with pytest.raises(ValueError, match=f"data/a.{kind}"):
        open_source(config(path=url, storage_options=s3.options), index).check(index)
