"""Datasets of the Hugging Face hub, or local folders of them, through the `datasets` library.

Three ways in, each of which can seek:
- prepared (or `save_to_disk`): a memory-mapped table; a block is a range of its rows;
- streaming, Parquet or Arrow files: the library says which files, their own source reads them;
- streaming, other files: a shard is read from its start, so it is a file of one block. Its rows are
  counted by reading it once, because nothing else knows how many there are.

The revision of a hub dataset is resolved to a commit once and kept in the index: whoever opens the
source with that index gets that commit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline.config import HFSource
from pipeline.input.arrow import ArrowFiles
from pipeline.input.files import in_pieces, refuse
from pipeline.input.parquet import ParquetFiles
from pipeline.input.source import BATCH_ROWS, Block, InputIndex, Source, input_file

if TYPE_CHECKING:
    from datasets import Dataset, DatasetBuilder, IterableDataset

BLOCK_ROWS = 1000
# Rows hashed at each end of a table or shard, to tell whether it is still the same.
DIGEST_ROWS = 32
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SEEKABLE = {"parquet": ParquetFiles, "arrow": ArrowFiles}


def open_dataset(config: HFSource, index: InputIndex | None = None) -> Source:
    """The source behind `source=hf`. Raises ValueError naming the key that cannot be met."""
    folder = Path(config.path).expanduser()
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return TableRows(config, partial(_load_folder, config, folder), index, {})
    pinned = index.metadata.get("revision") if index else None
    builder = _builder(config, pinned or config.revision)
    found = _revision(builder)
    if pinned and found != pinned:
        # Offline, the library falls back to the newest copy in its cache, whatever was asked for.
        raise ValueError(
            f"source.path={config.path} was pinned to revision {pinned} when the job started, but only "
            f"{found} is here: make that revision available or use another output.dir"
        )
    metadata = {"revision": found} if found else {}
    if not config.streaming:
        return TableRows(config, partial(_load_prepared, config, builder), index, metadata)
    data_files = builder.config.data_files or {}
    if data_files and config.split not in data_files:
        raise ValueError(
            f"source.split={config.split} is not among {', '.join(map(str, data_files))}; "
            "a part of a split is chosen with source.skip and source.limit"
        )
    reader = _SEEKABLE.get(_module(builder))
    if reader is not None:
        paths = [str(path) for path in data_files[config.split]]
        return reader(paths, None, index, config.allow_append, metadata)
    return StreamedShards(config, builder, index, metadata)


@contextmanager
def _loading(config: HFSource, what: str = "loaded") -> Iterator[None]:
    """One sentence for whatever the library raises; its own errors are OSErrors and ValueErrors."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (DatasetsError, OSError, ValueError, pa.ArrowException) as error:
        reason = " ".join(f"{error} {error.__cause__ or ''}".split()) or type(error).__name__
        raise ValueError(
            f"source.path={config.path} (source.name={config.name}, source.split={config.split}) "
            f"cannot be {what}: {reason}"
        ) from error


def _builder(config: HFSource, revision: str | None) -> DatasetBuilder:
    from datasets import load_dataset_builder

    with _loading(config):
        return load_dataset_builder(config.path, config.name, data_files=config.data_files, revision=revision)


def _module(builder: DatasetBuilder) -> str:
    """Which of the library's formats the builder is of: `parquet`, `json`, …"""
    packages = [kind.__module__.split(".") for kind in type(builder).__mro__]
    return next((names[-1] for names in packages if names[:2] == ["datasets", "packaged_modules"]), "")


def _revision(builder: DatasetBuilder) -> str | None:
    """The commit of a hub dataset. Folders have none: their `hash` is of the builder."""
    at_commit = re.search(rf"@({_COMMIT.pattern})", builder.base_path or "")
    if at_commit:
        return at_commit[1]
    commit = builder.hash or ""
    return commit if builder.repo_id and _COMMIT.fullmatch(commit) else None


class TableRows:
    """A memory-mapped table as one file of BLOCK_ROWS rows a block; a row's number is that in the split."""

    def __init__(
        self,
        config: HFSource,
        load: Callable[[], Dataset],
        index: InputIndex | None,
        metadata: dict[str, str],
    ):
        self.config = config
        self.index = index
        self.metadata = metadata
        self._load = load

    @cached_property
    def dataset(self) -> Dataset:
        with _loading(self.config):
            # As Arrow, so that no value passes through Python on its way to the output.
            return self._load().with_format("arrow")

    def scan(self) -> InputIndex:
        if self.index is None:
            rows = len(self.dataset)
            blocks = [(min(BLOCK_ROWS, rows - start), start) for start in range(0, rows, BLOCK_ROWS)]
            path = f"{self.config.path}[{self.config.split}]"
            file = input_file(0, path, self.dataset.data.nbytes, self._digest(), blocks)
            self.index = InputIndex((file,), self.dataset.data.schema.remove_metadata(), self.metadata)
        return self.index

    def check(self, index: InputIndex) -> None:
        (file,) = index.files
        rows = len(self.dataset)
        if rows != file.num_rows:
            refuse([f"{file.path} had {file.num_rows} rows and has {rows}"])
        if self._digest() != file.digest:
            refuse([f"{file.path} has other content"])

    def read(self, block: Block, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        assert block.locator is not None
        schema = _chosen(self.scan(), columns)
        chosen = self.dataset.select_columns(list(columns)) if columns else self.dataset
        with _loading(self.config, "read"):
            table = chosen[block.locator : block.locator + block.num_rows]
            for batch in table.to_batches(max_chunksize=BATCH_ROWS):
                yield from in_pieces(batch, schema)

    def _digest(self) -> str:
        rows = len(self.dataset)
        head = self.dataset[: min(DIGEST_ROWS, rows)]
        tail = self.dataset[max(0, rows - DIGEST_ROWS) : rows]
        return _rows_digest([head, tail])


class StreamedShards:
    """A streamed dataset that cannot seek: a shard is a file of one block, read from its start."""

    def __init__(
        self, config: HFSource, builder: DatasetBuilder, index: InputIndex | None, metadata: dict[str, str]
    ):
        self.config = config
        self.index = index
        self.metadata = metadata
        self._builder = builder

    @cached_property
    def dataset(self) -> IterableDataset:
        with _loading(self.config):
            dataset = self._builder.as_streaming_dataset(split=self.config.split)
            # More shards than files, where the format and the library's version know how.
            if hasattr(dataset, "reshard"):
                dataset = dataset.reshard()
            return dataset.with_format("arrow")

    def scan(self) -> InputIndex:
        if self.index is not None:
            return self.index
        files = []
        schema = self.dataset.features.arrow_schema if self.dataset.features else None
        for number in range(self.dataset.num_shards):
            rows, digest = 0, _rows_digest([])
            for table in self._tables(number):
                digest = digest if rows else _rows_digest([table[:DIGEST_ROWS]])
                schema = schema or table.schema
                rows += table.num_rows
            files.append(input_file(number, self._name(number), 0, digest, [(rows, None)]))
        columns = (schema or pa.schema([])).remove_metadata()
        self.index = InputIndex(tuple(files), columns, self.metadata)
        return self.index

    def check(self, index: InputIndex) -> None:
        """Looks at the number of shards and the first rows of the outer two: opening each is not cheap."""
        shards = self.dataset.num_shards
        if shards != len(index.files):
            refuse([f"{self.config.path} had {len(index.files)} shards and has {shards}"])
        for number in sorted({0, shards - 1}):
            first = next(self._tables(number), None)
            digest = _rows_digest([first[:DIGEST_ROWS]] if first is not None else [])
            if digest != index.files[number].digest:
                refuse([f"{self._name(number)} has other content"])

    def read(self, block: Block, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        schema = _chosen(self.scan(), columns)
        rows = 0
        for table in self._tables(block.file, columns):
            rows += table.num_rows
            for batch in table.to_batches():
                yield from in_pieces(batch, schema)
        if rows != block.num_rows:
            refuse([f"{self._name(block.file)} had {block.num_rows} rows and has {rows}"])

    def _tables(self, number: int, columns: Sequence[str] = ()) -> Iterator[pa.Table]:
        shard = self.dataset.shard(self.dataset.num_shards, number)
        if columns:
            shard = shard.select_columns(list(columns))
        with _loading(self.config, f"read in shard {number}"):
            yield from shard.iter(batch_size=BATCH_ROWS)

    def _name(self, number: int) -> str:
        return f"{self.config.path}[{self.config.split}] shard {number}"


def _load_folder(config: HFSource, folder: Path) -> Dataset:
    """What `save_to_disk` wrote: the split of a DatasetDict, or the one dataset there is."""
    from datasets import load_from_disk

    listing = folder / "dataset_dict.json"
    if listing.is_file():
        splits = json.loads(listing.read_text())["splits"]
        if config.split not in splits:
            raise ValueError(f"source.split={config.split} is not among {', '.join(splits)}")
        folder = folder / config.split
    return load_from_disk(str(folder))


def _load_prepared(config: HFSource, builder: DatasetBuilder) -> Dataset:
    builder.download_and_prepare()
    return builder.as_dataset(split=config.split)


def _chosen(index: InputIndex, columns: Sequence[str]) -> pa.Schema:
    index.require(columns, "the job")
    return pa.schema([index.schema.field(name) for name in columns])


def _rows_digest(tables: list[pa.Table]) -> str:
    """A hash of rows by value: their bytes differ between versions of the library."""
    hashed = hashlib.sha256()
    for table in tables:
        types = [f"{column.name}: {column.type}" for column in table.schema]
        hashed.update(repr((types, table.to_pylist())).encode("utf-8", "surrogatepass"))
    return hashed.hexdigest()[:32]
