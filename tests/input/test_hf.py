"""Datasets through the library: saved folders, prepared tables, streamed files and shards. No network."""

from __future__ import annotations

import csv
import json
import types
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import HFSource
from pipeline.input import hf
from pipeline.input.order import RowOrder
from pipeline.input.parquet import ParquetFiles
from pipeline.input.rows import read_rows
from pipeline.input.source import InputIndex, Source, open_source


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    datasets.disable_progress_bars()


def table(start: int, stop: int) -> pa.Table:
    numbers = range(start, stop)
    messages = [[{"role": "user", "content": f"hi {number}"}] for number in numbers]
    return pa.table(
        {
            "id": pa.array(numbers, pa.int32()),
            "text": pa.array([f"row {number}" for number in numbers], pa.large_string()),
            "messages": pa.array(
                messages, pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
            ),
            "score": pa.array([None if number % 3 else number / 2 for number in numbers], pa.float32()),
        }
    )


def rows_of(source: Source, index: InputIndex, columns: list[str]) -> pa.Table:
    batches = [batch for block in index.blocks for batch in source.read(block, columns)]
    assert all(batch.num_rows <= 1024 for batch in batches)
    return pa.Table.from_batches(batches).combine_chunks()


@pytest.fixture
def parquet_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    pq.write_table(table(0, 1500), folder / "train-00000-of-00002.parquet", row_group_size=500)
    pq.write_table(table(1500, 2500), folder / "train-00001-of-00002.parquet", row_group_size=500)
    pq.write_table(table(0, 10), folder / "test-00000-of-00001.parquet")
    return folder


@pytest.fixture
def csv_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "csv"
    folder.mkdir()
    for shard, (start, stop) in enumerate([(0, 1200), (1200, 1200 + 300), (1500, 1501)]):
        with (folder / f"train-{shard}.csv").open("w") as out:
            writer = csv.writer(out)
            writer.writerow(["id", "text"])
            writer.writerows([number, f"row {number}"] for number in range(start, stop))
    return folder


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("in_splits", [False, True])
def test_a_saved_folder_keeps_its_types(streaming: bool, in_splits: bool, tmp_path: Path) -> None:
    dataset = datasets.Dataset(table(0, 2500))
    saved = (
        datasets.DatasetDict({"train": dataset, "test": dataset.select(range(5))}) if in_splits else dataset
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    source = open_source(HFSource(path=str(tmp_path / "saved"), streaming=streaming))
    index = source.scan()
    assert index.num_rows == 2500
    assert [(block.first_row, block.num_rows, block.locator) for block in index.blocks] == [
        (0, 1000, 0),
        (1000, 1000, 1000),
        (2000, 500, 2000),
    ]
    assert index.schema.types == table(0, 1).schema.types
    assert rows_of(source, index, ["text", "id", "messages", "score"]).equals(
        table(0, 2500).select(["text", "id", "messages", "score"])
    )
    assert sum(batch.num_rows for batch in source.read(index.blocks[2], [])) == 500


def test_a_saved_selection_is_what_was_selected(tmp_path: Path) -> None:
    picked = [5, 3, 99, 3, 0] * 300
    datasets.Dataset(table(0, 100)).select(picked).save_to_disk(str(tmp_path / "saved"))
    source = open_source(HFSource(path=str(tmp_path / "saved")))
    assert rows_of(source, source.scan(), ["id"]).column("id").to_pylist() == picked


def test_a_split_that_a_saved_folder_lacks_is_named(tmp_path: Path) -> None:
    datasets.DatasetDict({"train": datasets.Dataset(table(0, 5))}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"source\.split=tset is not among train"):
        open_source(HFSource(path=str(tmp_path / "saved"), split="tset")).scan()


def test_a_prepared_table_keeps_its_types_and_seeks(parquet_folder: Path) -> None:
    source = open_source(HFSource(path=str(parquet_folder)))
    index = source.scan()
    assert index.num_rows == 2500 and len(index.blocks) == 3 and index.metadata == {}
    assert index.schema.types == table(0, 1).schema.types
    assert rows_of(source, index, ["id", "text", "messages", "score"]).equals(table(0, 2500))
    order = RowOrder(index.blocks, skip=10)
    again = open_source(HFSource(path=str(parquet_folder)), index)
    got = [row.value("id") for row in read_rows(again, order, [range(1000, 1005)], ["id"])]
    assert got == list(range(1010, 1015))
    again.check(index)


def test_streamed_parquet_is_read_from_its_files_by_row_group(
    parquet_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = HFSource(path=str(parquet_folder), streaming=True)
    index = open_source(config).scan()
    assert [Path(file.path).name[:11] for file in index.files] == ["train-00000", "train-00001"]
    assert [block.locator for block in index.blocks] == [0, 1, 2, 0, 1]

    opened: list[tuple[int, int | None]] = []
    original = ParquetFiles.read_block

    def noted(self, file, block, columns) -> Iterator[pa.RecordBatch]:
        opened.append((block.file, block.locator))
        return original(self, file, block, columns)

    monkeypatch.setattr(ParquetFiles, "read_block", noted)
    source = open_source(config, index)
    source.check(index)
    order = RowOrder(index.blocks)
    got = [row.value("id") for row in read_rows(source, order, [range(2100, 2110)], ["id"])]
    assert got == list(range(2100, 2110))
    assert opened == [(1, 1)]
    assert open_source(HFSource(path=str(parquet_folder), split="test", streaming=True)).scan().num_rows == 10


def test_streamed_shards_are_whole_files(csv_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = HFSource(path=str(csv_folder), streaming=True)
    source = open_source(config)
    index = source.scan()
    assert [file.num_rows for file in index.files] == [1200, 300, 1]
    assert all(block.locator is None for block in index.blocks)
    assert index.schema == pa.schema([("id", pa.int64()), ("text", pa.large_string())])
    got = rows_of(source, index, ["text", "id"])
    assert got.column("id").to_pylist() == list(range(1501))
    assert got.schema.names == ["text", "id"]
    assert [(u.start, u.stop) for u in RowOrder(index.blocks).units(100)] == [
        (0, 1200),
        (1200, 1500),
        (1500, 1501),
    ]
    assert sum(batch.num_rows for batch in source.read(index.blocks[1], [])) == 300

    again = open_source(config, index)
    order = RowOrder(index.blocks)
    read: list[int] = []
    original = hf.StreamedShards._tables

    def noted(self, number, columns=()):
        read.append(number)
        return original(self, number, columns)

    monkeypatch.setattr(hf.StreamedShards, "_tables", noted)
    assert [r.value("id") for r in read_rows(again, order, [range(1300, 1310)], ["id"])] == list(
        range(1300, 1310)
    )
    assert read == [1]
    again.check(index)


def test_the_three_ways_give_the_same_rows(tmp_path: Path) -> None:
    plain = table(0, 1500).select(["id", "text"])
    (tmp_path / "files").mkdir()
    pq.write_table(plain, tmp_path / "files" / "train.parquet")
    datasets.Dataset(plain).save_to_disk(str(tmp_path / "saved"))
    ways = [
        HFSource(path=str(tmp_path / "files")),
        HFSource(path=str(tmp_path / "files"), streaming=True),
        HFSource(path=str(tmp_path / "saved")),
    ]
    for config in ways:
        source = open_source(config)
        assert rows_of(source, source.scan(), ["id", "text"]).equals(plain)


def test_data_files_choose_the_files(parquet_folder: Path) -> None:
    for streaming in (False, True):
        config = HFSource(
            path=str(parquet_folder),
            data_files={"train": "test-*.parquet"},
            streaming=streaming,
        )
        assert open_source(config).scan().num_rows == 10


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"split": "tset"}, "source.split=tset"),
        ({"name": "german"}, "source.name=german"),
        ({"path": "/nowhere/at/all"}, "source.path=/nowhere/at/all"),
    ],
)
def test_what_cannot_be_met_names_its_key(
    streaming: bool, change: dict[str, str], named: str, parquet_folder: Path
) -> None:
    settings = {"path": str(parquet_folder), **change}
    with pytest.raises(ValueError) as caught:
        open_source(HFSource(streaming=streaming, **settings)).scan()
    assert named in str(caught.value)


def test_a_part_of_a_split_works_where_the_library_does_it(parquet_folder: Path) -> None:
    assert open_source(HFSource(path=str(parquet_folder), split="train[:7]")).scan().num_rows == 7
    with pytest.raises(ValueError, match=r"source\.split=train\[:7\] .*source\.limit"):
        open_source(HFSource(path=str(parquet_folder), split="train[:7]", streaming=True)).scan()


def test_check_tells_what_changed(tmp_path: Path) -> None:
    def saved(content: pa.Table, name: str) -> HFSource:
        datasets.Dataset(content).save_to_disk(str(tmp_path / name))
        return HFSource(path=str(tmp_path / name))

    index = open_source(saved(table(0, 100), "a")).scan()
    open_source(saved(table(0, 100), "same")).check(index)  # moved, not changed
    with pytest.raises(ValueError, match="had 100 rows and has 99"):
        open_source(saved(table(0, 99), "fewer")).check(index)
    with pytest.raises(ValueError, match="has other content"):
        open_source(saved(table(1, 101), "other")).check(index)


def test_check_of_shards_tells_what_changed(csv_folder: Path) -> None:
    config = HFSource(path=str(csv_folder), streaming=True)
    index = open_source(config).scan()
    text = (csv_folder / "train-2.csv").read_text()
    (csv_folder / "train-2.csv").write_text(text.replace("row 1500", "row X"))
    with pytest.raises(ValueError, match="shard 2 has other content"):
        open_source(config).check(index)
    (csv_folder / "train-2.csv").unlink()
    with pytest.raises(ValueError, match="had 3 shards and has 2"):
        open_source(config).check(index)
    # What is read is counted as well, since check looks at the outer shards only.
    (csv_folder / "train-1.csv").write_text("id,text\n1,x\n")
    with pytest.raises(ValueError, match=r"shard 1 had 300 rows and has 1"):
        list(open_source(config, index).read(index.blocks[1], ["id"]))


def test_a_type_that_changes_in_a_shard_is_an_error_and_no_lost_rows(tmp_path: Path) -> None:
    """500 rows went in elsewhere, 100 came out, and success was reported."""
    (tmp_path / "lines").mkdir()
    path = tmp_path / "lines" / "train.jsonl"
    path.write_text("".join(json.dumps({"v": n}) + "\n" for n in range(100)))
    other = tmp_path / "lines" / "train2.jsonl"
    other.write_text("".join(json.dumps({"v": n + 0.5}) + "\n" for n in range(400)))
    with pytest.raises(ValueError, match=r"cannot be read in shard 1: .*truncated"):
        open_source(HFSource(path=str(tmp_path / "lines"), streaming=True)).scan()


def fake_builder(base_path: str, hash: str, repo_id: str | None) -> types.SimpleNamespace:
    return types.SimpleNamespace(base_path=base_path, hash=hash, repo_id=repo_id)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("builder", "expected"),
    [
        (fake_builder(f"hf://datasets/org/name@{COMMIT}", "x", "org/name"), COMMIT),
        (fake_builder("/home/me/data", "a" * 40, None), None),
        (fake_builder("", COMMIT, "org/name"), COMMIT),  # from the cache, offline
        (fake_builder("", "a1b2", "org/name"), None),
    ],
)
def test_the_revision_is_a_commit(builder: types.SimpleNamespace, expected: str | None) -> None:
    assert hf._revision(builder) == expected


def test_a_resumed_job_asks_for_its_own_revision(
    parquet_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    builder = datasets.load_dataset_builder(str(parquet_folder))
    found = COMMIT

    def load(config: HFSource, revision: str | None) -> object:
        asked.append(revision)
        builder.base_path = f"hf://datasets/org/name@{found}"
        return builder

    monkeypatch.setattr(hf, "_builder", load)
    for streaming in (False, True):
        config = HFSource(path="org/name", revision="main", streaming=streaming)
        index = open_source(config).scan()
        assert index.metadata == {"revision": COMMIT}
        open_source(config, index)
    assert asked == ["main", COMMIT, "main", COMMIT]

    found = COMMIT[::-1]  # offline, the cache gives what it has
    with pytest.raises(ValueError, match=f"pinned to revision {COMMIT}.*only {found} is here"):
        open_source(config, index)
