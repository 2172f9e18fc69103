"""Arrow IPC, stream and file: told apart by content, indexed without reading data, batch by batch."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest

from pipeline.config import ArrowSource
from pipeline.input import files
from pipeline.input.arrow import ArrowFiles
from pipeline.input.source import Block, open_source

Writer = Callable[..., Any]


def table(start: int, stop: int) -> pa.Table:
    numbers = range(start, stop)
    texts = [f"row {number}" for number in numbers]
    return pa.table({"id": pa.array(numbers, pa.int64()), "text": pa.array(texts, pa.string())})


def write(
    path: Path,
    content: pa.Table,
    new: Writer = pa.ipc.new_stream,
    rows_per_batch: int = 100,
    compression: str | None = None,
) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=True)
    if new is pa.ipc.new_file:
        options.emit_dictionary_deltas = False
    with new(str(path), content.schema, options=options) as writer:
        for start in range(0, len(content), rows_per_batch):
            for batch in content.slice(start, rows_per_batch).combine_chunks().to_batches():
                writer.write_batch(batch)
    return path


FORMATS = pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file], ids=["stream", "file"])


@FORMATS
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_a_block_is_a_record_batch(new: Writer, compression: str | None, tmp_path: Path) -> None:
    content = table(0, 250)
    # The name says nothing about the format; the bytes do.
    write(tmp_path / "a.arrow", content, new, compression=compression)
    source = open_source(ArrowSource(path=str(tmp_path)))
    index = source.scan()
    assert [(block.first_row, block.num_rows) for block in index.blocks] == [(0, 100), (100, 100), (200, 50)]
    assert index.schema == content.schema
    for block in reversed(index.blocks):  # each alone, in any order
        (batch,) = source.read(block, ["text", "id"])
        expected = content.slice(block.first_row, block.num_rows).select(["text", "id"]).combine_chunks()
        assert pa.Table.from_batches([batch]).equals(expected)
    assert sum(batch.num_rows for block in index.blocks for batch in source.read(block, [])) == 250


@FORMATS
def test_dictionaries_are_found_wherever_they_lie(new: Writer, tmp_path: Path) -> None:
    words = [f"w{number // 60}" for number in range(300)]
    content = pa.table({"id": range(300), "word": pa.array(words).dictionary_encode()})
    if new is pa.ipc.new_stream:  # a dictionary that grows from batch to batch
        path = tmp_path / "a.arrow"
        options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
        with pa.ipc.new_stream(str(path), content.schema, options=options) as writer:
            known = ["w0", "w1"]
            for start in range(0, 300, 100):
                known = known + [f"w{n}" for n in range(len(known), (start + 99) // 60 + 1)]
                codes = pa.array([known.index(word) for word in words[start : start + 100]], pa.int32())
                column = pa.DictionaryArray.from_arrays(codes, pa.array(known))
                ids = content.column("id").slice(start, 100).combine_chunks()
                writer.write_batch(pa.record_batch([ids, column], schema=content.schema))
    else:
        write(tmp_path / "a.arrow", content, new)
    source = ArrowFiles(str(tmp_path))
    index = source.scan()
    assert index.num_rows == 300
    for block in reversed(index.blocks):
        (batch,) = source.read(block, ["word"])
        assert batch.schema.field("word").type == content.schema.field("word").type
        assert batch.column("word").to_pylist() == words[block.first_row : block.first_row + block.num_rows]


@FORMATS
def test_nested_types_and_nulls(new: Writer, tmp_path: Path) -> None:
    message = pa.struct([("role", pa.string()), ("content", pa.large_string())])
    content = pa.table(
        {
            "messages": pa.array([[{"role": "user", "content": "hi"}], None, []], pa.list_(message)),
            "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int32())),
            "half": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float16(), 2)),
            "words": pa.array([["a"], ["b", "a"], None], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
            "nothing": pa.nulls(3),
        }
    )
    write(tmp_path / "a.arrow", content, new)
    source = ArrowFiles(str(tmp_path))
    (block,) = source.scan().blocks
    (batch,) = source.read(block, content.schema.names)
    assert pa.Table.from_batches([batch]).equals(content)


@FORMATS
def test_large_batches_come_in_pieces(new: Writer, tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", table(0, 3000), new, rows_per_batch=3000)
    source = ArrowFiles(str(tmp_path))
    (block,) = source.scan().blocks
    assert [batch.num_rows for batch in source.read(block, ["id"])] == [1024, 1024, 952]


class Recorder(io.BytesIO):
    def __init__(self, content: bytes, counted: list[int]):
        super().__init__(content)
        self.counted = counted

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.counted.append(len(data))
        return data


@FORMATS
def test_neither_scan_nor_resume_reads_data_it_does_not_want(
    new: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = pa.table({"id": range(1000), "big": [os.urandom(5000) for _ in range(1000)]})
    path = write(tmp_path / "a.arrow", content, new)
    counted: list[int] = []
    monkeypatch.setattr(
        files, "open_input", lambda *_: pa.PythonFile(Recorder(path.read_bytes(), counted), mode="r")
    )
    source = ArrowFiles(str(path))
    index = source.scan()
    assert sum(counted) < 300_000  # of 5 MB: headers, and the digest's two ends

    counted.clear()
    (batch,) = source.read(index.blocks[7], ["id"])
    assert batch.column("id").to_pylist() == list(range(700, 800))
    assert sum(counted) < 600_000  # one batch of ten


@FORMATS
def test_any_fsspec_url(new: Writer, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/arrow/a.arrow", write(tmp_path / "a.arrow", table(0, 250), new).read_bytes())
    source = ArrowFiles("memory://arrow/*.arrow")
    index = source.scan()
    got = [b.column("id").to_pylist() for block in index.blocks for b in source.read(block, ["id"])]
    assert sum(got, []) == list(range(250))
    memory.store.clear()


@FORMATS
def test_no_rows_are_no_error(new: Writer, tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", table(0, 0), new)
    index = ArrowFiles(str(tmp_path)).scan()
    assert (index.num_rows, index.blocks, index.schema) == (0, (), table(0, 0).schema)


def test_both_formats_in_one_folder_and_empty_batches(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", table(0, 100), pa.ipc.new_file)
    with pa.ipc.new_stream(str(tmp_path / "b.arrow"), table(0, 0).schema) as writer:
        (batch,) = table(100, 160).combine_chunks().to_batches()
        for start, length in ((0, 50), (50, 0), (50, 10)):
            writer.write_batch(batch.slice(start, length))
    source = ArrowFiles(str(tmp_path))
    index = source.scan()
    assert [(block.file, block.first_row, block.num_rows) for block in index.blocks] == [
        (0, 0, 100),
        (1, 0, 50),
        (1, 50, 10),
    ]
    got = [b.column("id").to_pylist() for block in index.blocks for b in source.read(block, ["id"])]
    assert sum(got, []) == list(range(160))


@FORMATS
@pytest.mark.parametrize("keep", [0.0, 0.0005, 0.3, 0.97])
def test_a_file_cut_short_is_an_error_and_no_shorter_file(new: Writer, keep: float, tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", table(0, 1000), new)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match=r"a\.arrow cannot be read as Arrow IPC: "):
        ArrowFiles(str(path)).scan()


@pytest.mark.parametrize(
    "content", [b"FEA1 an old feather file, which is another format", b"\xff" * 64, b"{}\n" * 50]
)
def test_what_is_not_arrow_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.arrow cannot be read as Arrow IPC: "):
        ArrowFiles(str(tmp_path)).scan()


def test_a_stream_need_not_have_an_end_mark(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", table(0, 100))
    path.write_bytes(path.read_bytes()[:-8])
    assert ArrowFiles(str(path)).scan().num_rows == 100


def test_a_schema_that_changes_names_file_column_and_types(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", table(0, 5))
    write(tmp_path / "b.arrow", pa.table({"id": [0.5], "text": ["x"]}))
    with pytest.raises(ValueError, match=r"b\.arrow has column id as double, the files before it as int64"):
        ArrowFiles(str(tmp_path)).scan()


def test_streams_are_found_by_offset_and_files_by_number(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", table(0, 200), pa.ipc.new_file)
    assert ArrowFiles(str(tmp_path)).scan().blocks == (Block(0, 0, 100, 0), Block(0, 100, 100, 1))
    path = write(tmp_path / "a.arrow", table(0, 200))
    first, second = ArrowFiles(str(tmp_path)).scan().blocks
    for block in (first, second):
        assert block.locator is not None
        assert path.read_bytes()[block.locator :][:4] == b"\xff" * 4
