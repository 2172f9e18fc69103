"""Parquet: seekable by row group, on any file system, without the datasets library."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import ParquetSource
from pipeline.input import files
from pipeline.input.order import RowOrder
from pipeline.input.parquet import ParquetFiles
from pipeline.input.rows import read_rows
from pipeline.input.source import Block, InputIndex, open_source


def table(start: int, stop: int) -> pa.Table:
    numbers = range(start, stop)
    texts = [f"row {number}" for number in numbers]
    return pa.table({"id": pa.array(numbers, pa.int64()), "text": pa.array(texts, pa.string())})


def write(path: Path, content: pa.Table, rows_per_group: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(content, path, row_group_size=rows_per_group)
    return path


def ids(source: ParquetFiles, index: InputIndex) -> list[int]:
    return [
        number
        for block in index.blocks
        for batch in source.read(block, ["id"])
        for number in batch.column("id").to_pylist()
    ]


def names(index: InputIndex) -> list[str]:
    return [os.path.basename(file.path) for file in index.files]


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def test_a_block_is_a_row_group(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", table(250, 300))
    write(tmp_path / "a.parquet", table(0, 250))
    source = open_source(ParquetSource(path=str(tmp_path)))
    index = source.scan()

    assert names(index) == ["a.parquet", "b.parquet"]
    assert index.num_rows == 300
    assert index.blocks == (
        Block(0, 0, 100, 0),
        Block(0, 100, 100, 1),
        Block(0, 200, 50, 2),
        Block(1, 0, 50, 0),
    )
    assert index.schema == pa.schema([("id", pa.int64()), ("text", pa.string())])
    assert ids(source, index) == list(range(300))


def test_columns_come_as_asked_for_in_small_batches(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(0, 2500), rows_per_group=2500)
    source = ParquetFiles(str(tmp_path / "a.parquet"))
    (block,) = source.scan().blocks
    batches = list(source.read(block, ["text", "id"]))
    assert [batch.num_rows for batch in batches] == [1024, 1024, 452]
    assert all(batch.schema.names == ["text", "id"] for batch in batches)
    assert sum(batch.num_rows for batch in source.read(block, [])) == 2500
    with pytest.raises(ValueError, match=r"a\.parquet has no column body: its columns are id, text"):
        list(source.read(block, ["body"]))


def test_a_column_whose_name_begins_like_another(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table({"a": [{"b": 1}], "a.b": ["dotted"], "a.b.c": [2.5]}))
    source = ParquetFiles(str(tmp_path))
    (block,) = source.scan().blocks
    for column, value in (("a", {"b": 1}), ("a.b", "dotted"), ("a.b.c", 2.5)):
        (batch,) = source.read(block, [column])
        assert batch.to_pylist() == [{column: value}]


def test_types_are_carried_exactly(tmp_path: Path) -> None:
    content = pa.table(
        {
            "large": pa.array(["x", None], pa.large_string()),
            "kind": pa.array(["a", "b"]).dictionary_encode(),
            "when": pa.array([1, None], pa.timestamp("us", "UTC")),
            "messages": pa.array(
                [[{"role": "user", "content": "hi"}], []],
                pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
            ),
            "price": pa.array(["1.50", "2.25"]).cast(pa.decimal128(5, 2)),
            "vector": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float16(), 2)),
            "nothing": pa.nulls(2),
        }
    )
    write(tmp_path / "a.parquet", content)
    source = ParquetFiles(str(tmp_path))
    index = source.scan()
    assert index.schema.types == content.schema.types
    (batch,) = source.read(index.blocks[0], content.schema.names)
    assert pa.Table.from_batches([batch]) == content
    assert batch.schema == index.schema


class Recorder(io.BytesIO):
    """A file that notes which bytes of it were read."""

    def __init__(self, content: bytes, reads: list[tuple[int, int]]):
        super().__init__(content)
        self.reads = reads

    def read(self, size: int | None = -1) -> bytes:
        start = self.tell()
        data = super().read(size)
        self.reads.append((start, start + len(data)))
        return data


def test_resuming_reads_only_the_wanted_row_group_and_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 5000
    content = pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "text": [os.urandom(40).hex() for _ in range(rows)],
            "big": [os.urandom(100) for _ in range(rows)],
        }
    )
    path = write(tmp_path / "a.parquet", content, rows_per_group=500)
    source = ParquetFiles(str(path))
    index = source.scan()
    reads: list[tuple[int, int]] = []
    monkeypatch.setattr(
        files, "open_input", lambda *_: pa.PythonFile(Recorder(path.read_bytes(), reads), mode="r")
    )

    order = RowOrder(index.blocks)
    resumed = ParquetFiles(str(path), index=index)
    got = [row.value("id") for row in read_rows(resumed, order, [range(3600, 3900)], ["id", "text"])]
    assert got == list(range(3600, 3900))

    footer = pq.read_metadata(path)
    # The footer is read as the file's last 64 KiB, whatever lies there.
    data = [(begin, stop) for begin, stop in reads if stop < path.stat().st_size]

    def bytes_read(group: int, column: int) -> int:
        chunk = footer.row_group(group).column(column)
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        return sum(
            max(0, min(stop, start + chunk.total_compressed_size) - max(begin, start)) for begin, stop in data
        )

    assert bytes_read(7, 0) > 0 and bytes_read(7, 1) > 0
    untouched = [(group, column) for group in range(10) for column in range(3) if group != 7 or column == 2]
    assert [place for place in untouched if bytes_read(*place)] == []


def test_the_footer_is_read_once_for_neighbouring_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.parquet", table(0, 1000))
    source = ParquetFiles(str(path))
    index = source.scan()
    reads: list[tuple[int, int]] = []
    monkeypatch.setattr(
        files, "open_input", lambda *_: pa.PythonFile(Recorder(path.read_bytes(), reads), mode="r")
    )
    assert ids(source, index) == list(range(1000))
    size = path.stat().st_size
    assert sum(stop == size for _, stop in reads) <= 2


def test_memory_stays_flat_over_a_large_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), compression="none") as writer:
        text = [os.urandom(100).hex() for _ in range(2000)]
        content = pa.table({"text": text * 100})  # 40 MB in one row group
        writer.write_table(content, row_group_size=200_000)
    del content
    source = ParquetFiles(str(path))
    (block,) = source.scan().blocks
    before = pa.total_allocated_bytes()
    peak = 0
    num_rows = 0
    for batch in source.read(block, ["text"]):
        num_rows += batch.num_rows
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert num_rows == 200_000
    assert peak < 12 * 2**20


def test_any_fsspec_url(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    for name, start in (("in/x/a.parquet", 0), ("in/b.parquet", 10), ("in/_tmp/c.parquet", 20)):
        buffer = io.BytesIO()
        pq.write_table(table(start, start + 10), buffer)
        memory.pipe_file(f"/{name}", buffer.getvalue())

    for path in ("memory://in", "memory://in/**/*.parquet", ["memory://in/b.parquet", "memory://in/x/*"]):
        index = ParquetFiles(path).scan()
        assert [file.path for file in index.files] == ["memory:///in/b.parquet", "memory:///in/x/a.parquet"]
        source = ParquetFiles(path, index=index)
        assert ids(source, index) == [*range(10, 20), *range(10)]
        source.check(index)
    # A glob that spells the hidden name out means it.
    assert ids(ParquetFiles("memory://in/_tmp/*"), ParquetFiles("memory://in/_tmp/*").scan()) == [
        *range(20, 30)
    ]


def test_urls_of_archives_and_caches(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    member = write(tmp_path / "a.parquet", table(0, 10))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(member, "folder/a.parquet")
    memory.pipe_file("/remote/a.parquet", member.read_bytes())
    for path in (
        f"zip://folder/*.parquet::{tmp_path}/all.zip",
        "simplecache::memory://remote/*.parquet",
        f"simplecache::file://{tmp_path}/a.parquet",
    ):
        index = ParquetFiles(path).scan()
        assert ids(ParquetFiles(path, index=index), index) == list(range(10)), path


def test_directories_take_their_own_suffix_and_nothing_hidden(tmp_path: Path) -> None:
    root = tmp_path / ".cache" / "_input"  # hidden folders above what was asked for do not count
    for name in ("b/part-1.parquet", "a/deep/part-0.parquet", "c.pq"):
        write(root / name, table(0, 1))
    for name in (
        "_SUCCESS",
        ".hidden.parquet",
        "_metadata.parquet",
        "_tmp/x.parquet",
        ".x/y.parquet",
        "z.txt",
    ):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("not for reading")
    index = ParquetFiles(str(root)).scan()
    assert names(index) == ["part-0.parquet", "part-1.parquet", "c.pq"]
    assert names(ParquetFiles(str(root / "*" / "*.parquet")).scan()) == ["part-1.parquet"]


def test_links_and_names_with_glob_characters(tmp_path: Path) -> None:
    blob = write(tmp_path / "blobs" / "abc", table(0, 5))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "part[1].parquet").symlink_to(blob)
    assert ParquetFiles(str(tmp_path / "in")).scan().num_rows == 5
    assert ParquetFiles(str(tmp_path / "in" / "part[1].parquet")).scan().files[0].size == blob.stat().st_size


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(0, 5))
    assert ParquetFiles([str(path), str(tmp_path), str(tmp_path / "*")]).scan().num_rows == 5


def test_relative_paths_mean_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", table(0, 5))
    monkeypatch.chdir(tmp_path)
    assert [file.path for file in ParquetFiles("a.parquet").scan().files] == [str(path)]


@pytest.mark.parametrize("path", ["nothing.parquet", "*.parquet", "empty", "nosuch://a", []])
def test_matching_no_file_is_an_error_naming_the_path(path: str | list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    wanted = path if not isinstance(path, str) or "://" in path else str(tmp_path / path)
    with pytest.raises(ValueError, match="source.path=") as caught:
        ParquetFiles(wanted).scan()
    assert str(wanted) in str(caught.value)


def test_no_rows_are_no_error(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(0, 0))
    index = ParquetFiles(str(tmp_path)).scan()
    assert (index.num_rows, index.blocks, len(index.files)) == (0, (), 1)
    assert list(read_rows(ParquetFiles(str(tmp_path)), RowOrder(index.blocks), [], ["id"])) == []


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all, whatever its name says"])
def test_a_file_that_is_not_parquet_is_named(content: bytes, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(0, 5))
    (tmp_path / "b.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read as Parquet: "):
        ParquetFiles(str(tmp_path)).scan()


def test_damage_inside_a_file_is_named_when_it_is_met(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(0, 100))
    index = ParquetFiles(str(path)).scan()
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as Parquet"):
        ids(ParquetFiles(str(path)), index)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(0, 5)).chmod(0)
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as Parquet: .*ermission"):
        ParquetFiles(str(tmp_path)).scan()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            pa.table({"id": [1.5], "text": ["x"]}),
            "b.parquet has column id as double, the files before it as int64",
        ),
        (pa.table({"id": pa.nulls(1), "text": ["x"]}), "column id as null, the files before it as int64"),
        (pa.table({"id": [1]}), "b.parquet has column text as absent, the files before it as string"),
        (
            pa.table({"id": [1], "text": ["x"], "more": [1]}),
            "b.parquet has column more as int64, the files before it as absent",
        ),
    ],
)
def test_a_schema_that_changes_names_file_column_and_types(
    second: pa.Table, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "a.parquet", table(0, 5))
    write(tmp_path / "b.parquet", second)
    with pytest.raises(ValueError) as caught:
        ParquetFiles(str(tmp_path)).scan()
    assert message in str(caught.value)


def test_metadata_nullability_and_order_of_columns_may_differ(tmp_path: Path) -> None:
    strict = pa.schema(
        [pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string(), metadata={"a": "b"})]
    )
    write(tmp_path / "a.parquet", table(0, 3).cast(strict).replace_schema_metadata({"pandas": "{}"}))
    write(tmp_path / "b.parquet", pa.table({"text": ["x"], "id": pa.array([None], pa.int64())}))
    source = ParquetFiles(str(tmp_path))
    index = source.scan()
    batches = [batch for block in index.blocks for batch in source.read(block, ["id", "text"])]
    assert pa.Table.from_batches(batches).column("id").to_pylist() == [0, 1, 2, None]


def test_a_column_name_used_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", pa.table([[1], [2]], names=["x", "x"]))
    with pytest.raises(ValueError, match=r"a\.parquet has column x more than once"):
        ParquetFiles(str(tmp_path)).scan()


def test_check_tells_what_changed(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path / f"{name}.parquet", table(0, 50))
    source = ParquetFiles(str(tmp_path))
    index = source.scan()
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))  # data is restaged: times mean nothing
    source.check(index)

    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[100] ^= 1
    (tmp_path / "a.parquet").write_bytes(content)
    write(tmp_path / "b.parquet", table(0, 51))
    (tmp_path / "c.parquet").rename(tmp_path / "d.parquet")
    with pytest.raises(ValueError, match="the input changed since the job started") as caught:
        source.check(index)
    message = str(caught.value)
    assert "a.parquet has other content" in message
    assert "b.parquet had" in message and "bytes and has" in message
    assert "c.parquet is missing" in message and "d.parquet is new" in message
    assert "output.dir" in message


def test_files_that_come_later_go_behind(tmp_path: Path) -> None:
    write(tmp_path / "b.parquet", table(0, 50))
    index = ParquetFiles(str(tmp_path)).scan()
    write(tmp_path / "a.parquet", table(50, 60))
    assert ParquetFiles(str(tmp_path), index=index).scan() == index

    source = ParquetFiles(str(tmp_path), index=index, allow_append=True)
    source.check(index)
    longer = source.scan()
    assert longer.files[:1] == index.files
    assert names(longer) == ["b.parquet", "a.parquet"]
    assert ids(source, longer) == list(range(60))


def test_a_file_with_fewer_rows_than_counted_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(0, 50))
    index = ParquetFiles(str(path)).scan()
    write(path, table(0, 40))
    with pytest.raises(ValueError, match=r"a\.parquet has 40 rows from row 0 on where 50 were counted"):
        ids(ParquetFiles(str(path), index=index), index)


def test_an_index_survives_its_file(tmp_path: Path) -> None:
    content = table(0, 250).append_column("kind", pa.array(["a"] * 250).dictionary_encode())
    write(tmp_path / "in" / "a.parquet", content)
    write(tmp_path / "in" / "b.parquet", content.slice(0, 0))
    index = ParquetFiles(str(tmp_path / "in"), metadata={"revision": "abc"}).scan()
    index.save(tmp_path / "input.arrow")
    loaded = InputIndex.load(tmp_path / "input.arrow")
    assert loaded == index
    assert loaded.digest == index.digest and loaded.num_rows == 250 and loaded.metadata == {"revision": "abc"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_index_of_nothing_and_of_whole_files_survives(tmp_path: Path) -> None:
    empty = InputIndex((), pa.schema([]))
    empty.save(tmp_path / "empty")
    assert InputIndex.load(tmp_path / "empty") == empty
    whole = InputIndex((files.input_file(0, "x.gz", 10, "d", [(7, None)]),), pa.schema([("a", pa.int8())]))
    whole.save(tmp_path / "whole")
    assert InputIndex.load(tmp_path / "whole") == whole


def test_a_missing_column_names_the_setting(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(0, 5))
    index = ParquetFiles(str(tmp_path)).scan()
    index.require(["text"], "prompt.column")
    with pytest.raises(ValueError, match="prompt.column asks for column txt, .*its columns are id, text"):
        index.require(["txt"], "prompt.column")


def test_parquet_never_loads_datasets_or_torch(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", table(0, 5))
    script = f"""
import sys
from pipeline.config import ParquetSource
from pipeline.input.source import open_source
from pipeline.input.order import RowOrder
from pipeline.input.rows import read_rows
source = open_source(ParquetSource(path={str(tmp_path)!r}))
order = RowOrder(source.scan().blocks)
print(sum(row.value("id") for row in read_rows(source, order, [range(5)], ["id"])))
print([name for name in ("datasets", "torch", "transformers", "pandas") if name in sys.modules])
"""
    root = Path(files.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True, timeout=60
    )
    assert done.stdout.split("\n")[:2] == ["10", "[]"]
