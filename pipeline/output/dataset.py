"""The files of a finished dataset: Arrow shards that `datasets` opens, Parquet, metadata, card.

Knows: their names and forms, and how to read them back. Refuses to know: parts, units, journals. No byte
here depends on anything but the schema and the rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import durable
from pipeline.output.schema import PROVENANCE

# Rows of a record batch, and of a Parquet row group: what `datasets` itself writes.
BATCH_ROWS = 1000
_SHARD_BYTES = 512 * 2**20
_STATE = "state.json"
_INFO = "dataset_info.json"
_PARQUET = "parquet"


class DatasetFormat(str, Enum):
    arrow = "arrow"
    parquet = "parquet"
    both = "both"


def rebatch(tables: Iterable[pa.Table], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of BATCH_ROWS, the last fewer, whatever the tables' sizes were."""
    waiting: list[pa.Table] = []
    num_waiting = 0
    for table in tables:
        waiting.append(table)
        num_waiting += table.num_rows
        while num_waiting >= BATCH_ROWS:
            whole = pa.concat_tables(waiting)
            yield _batch(whole.slice(0, BATCH_ROWS), schema)
            waiting, num_waiting = [whole.slice(BATCH_ROWS)], num_waiting - BATCH_ROWS
    if num_waiting:
        yield _batch(pa.concat_tables(waiting), schema)


def _batch(table: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    assert len(batches) == 1, "rows of one batch overflow an Arrow offset"
    # a copy without offsets and leftovers, so that equal rows are equal bytes
    copy = batches[0].take(pa.array(range(table.num_rows), pa.int64()))
    return pa.RecordBatch.from_arrays(copy.columns, schema=schema)


@dataclass
class _Shards:
    """Writes batches into numbered files; a file that grew beyond the limit is the last of its number."""

    folder: Path
    schema: pa.Schema
    suffix: str
    num_rows: int = 0
    paths: list[Path] = field(default_factory=list)
    _file: durable.DurableFile | None = None
    _writer: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        if self._file is not None and self._file.size >= _SHARD_BYTES:
            self._end_file()
        self._require_file()
        if self.suffix == "arrow":
            self._writer.write_batch(batch)
        else:
            self._writer.write_table(pa.Table.from_batches([batch]), row_group_size=BATCH_ROWS)
        self.num_rows += batch.num_rows

    def close(self) -> list[Path]:
        """Ends the last file (there is always one) and gives all their final names."""
        self._require_file()
        self._end_file()
        count = len(self.paths)
        final = [self.folder / f"data-{i:05d}-of-{count:05d}.{self.suffix}" for i in range(count)]
        for path, name in zip(self.paths, final, strict=True):
            durable.rename(path, name)
        durable.fsync_directory(self.folder)
        return final

    def abandon(self) -> None:
        if self._file is not None:
            self._file.abandon()

    def _require_file(self) -> None:
        if self._file is not None:
            return
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"data-{len(self.paths):05d}.{self.suffix}"
        self.paths.append(path)
        self._file = durable.DurableFile(path)
        if self.suffix == "arrow":
            self._writer = pa.ipc.new_stream(self._file, self.schema)
        else:
            self._writer = pq.ParquetWriter(self._file, self.schema, compression="zstd")

    def _end_file(self) -> None:
        assert self._file is not None
        self._writer.close()
        self._file.close()
        self._file = self._writer = None


def write_dataset(
    folder: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], form: DatasetFormat, identity: str
) -> tuple[int, list[Path]]:
    """Writes rows and metadata into a new folder; returns the number of rows and the data files.

    identity: what the dataset is, as a hash; `datasets` keys its caches by it.
    """
    shards = []
    if form is not DatasetFormat.parquet:
        shards.append(_Shards(folder, schema, "arrow"))
    if form is not DatasetFormat.arrow:
        shards.append(_Shards(folder / _PARQUET, schema, "parquet"))
    try:
        for batch in batches:
            for writer in shards:
                writer.write(batch)
        files = [writer.close() for writer in shards]
    except BaseException:
        for writer in shards:
            writer.abandon()
        raise
    if form is not DatasetFormat.parquet:
        _write_metadata(folder, [path.name for path in files[0]], identity)
    return shards[0].num_rows, [path for paths in files for path in paths]


def _write_metadata(folder: Path, shards: list[str], identity: str) -> None:
    # features are left to the Arrow schema, which says the same to every version of `datasets`
    info = {"citation": "", "description": "", "features": None, "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in shards],
        "_fingerprint": identity[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    for name, content in ((_INFO, info), (_STATE, state)):
        durable.atomic_write(folder / name, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


@dataclass(frozen=True)
class DatasetFiles:
    """A dataset's data files of one form, to be read back in order."""

    paths: tuple[Path, ...]
    form: DatasetFormat

    def schema(self) -> pa.Schema:
        """Raises ValueError, OSError if the first file is no such file."""
        if self.form is DatasetFormat.parquet:
            return pq.read_schema(self.paths[0])
        with pa.memory_map(str(self.paths[0])) as file:
            return pa.ipc.open_stream(file).schema

    def options(self) -> dict[str, Any]:
        """What `finalize` was told, as the schema's metadata keeps it."""
        facts = json.loads((self.schema().metadata or {}).get(PROVENANCE, b"{}"))
        options: dict[str, Any] = facts.get("finalize", {})
        return options

    def tables(self) -> Iterator[pa.Table]:
        for path in self.paths:
            if self.form is DatasetFormat.parquet:
                with pq.ParquetFile(path) as file:
                    yield from (pa.Table.from_batches([batch]) for batch in file.iter_batches(BATCH_ROWS))
            else:
                with pa.memory_map(str(path)) as mapped:
                    yield from (pa.Table.from_batches([batch]) for batch in pa.ipc.open_stream(mapped))


def dataset_files(folder: Path) -> list[DatasetFiles]:
    """The forms in which a finished dataset lies in `folder`. Raises ValueError if files are missing."""
    found = []
    if (folder / _STATE).exists():
        try:
            names = [entry["filename"] for entry in json.loads((folder / _STATE).read_text())["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / _STATE} is damaged ({error})") from error
        found.append(DatasetFiles(tuple(folder / name for name in names), DatasetFormat.arrow))
    if (folder / _PARQUET).is_dir():
        paths = tuple(sorted((folder / _PARQUET).glob("*.parquet")))
        found.append(DatasetFiles(paths, DatasetFormat.parquet))
    for files in found:
        missing = [str(path) for path in files.paths if not path.exists()]
        if missing or not files.paths:
            raise ValueError(f"{folder} lacks {', '.join(missing) or 'its Parquet files'}")
    if not found:
        raise ValueError(f"{folder} holds no dataset")
    return found
