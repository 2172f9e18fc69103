"""Writing rows into shard files of one form: Arrow streams or Parquet, each ended at a size.

Knows: how a shard comes to be, whole and durable, and what it is afterwards. Refuses to know: which rows,
what the files are called in the end. No byte of a shard depends on anything but schema, rows and sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import durable
from pipeline.output.part import END_OF_STREAM

# Rows of a record batch, and of a Parquet row group: what `datasets` itself writes.
BATCH_ROWS = 1000
ARROW = "arrow"
PARQUET = "parquet"


@dataclass(frozen=True)
class Shard:
    """A finished file, by its name in its folder.

    ends: where the schema and each batch end, in bytes; of Arrow only, empty for Parquet.
    """

    name: str
    rows: int
    size: int
    sha256: str
    ends: tuple[int, ...]


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


class _HashedFile(durable.DurableFile):
    """Knows the hash of what went through it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.hash = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self.hash.update(data)
        return super().write(data)


class _ArrowStream:
    """The messages of an Arrow stream, one by one, so that their places are known."""

    def __init__(self, file: _HashedFile, schema: pa.Schema) -> None:
        self._file = file
        file.write(memoryview(schema.serialize()))
        self.ends = [file.size]

    def write(self, batch: pa.RecordBatch) -> None:
        self._file.write(memoryview(batch.serialize()))
        self.ends.append(self._file.size)

    def close(self) -> None:
        self._file.write(END_OF_STREAM)


class _ParquetStream:
    def __init__(self, file: _HashedFile, schema: pa.Schema) -> None:
        self._writer: Any = pq.ParquetWriter(file, schema, compression="zstd")
        self.ends: list[int] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_table(pa.Table.from_batches([batch]), row_group_size=BATCH_ROWS)

    def close(self) -> None:
        self._writer.close()


class ShardWriter:
    """Writes batches into new files `<prefix>00000.<form>` and on, each ended once it exceeds max_bytes.

    Each file is durable once the next is begun, its name is not. form: ARROW or PARQUET.
    """

    def __init__(self, folder: Path, schema: pa.Schema, form: str, max_bytes: int, prefix: str) -> None:
        self.form = form
        self._folder = folder
        self._schema = schema
        self._max_bytes = max_bytes
        self._prefix = prefix
        self._file: _HashedFile | None = None
        self._stream: _ArrowStream | _ParquetStream | None = None
        self._rows = 0
        self.shards: list[Shard] = []

    @property
    def num_rows(self) -> int:
        return sum(shard.rows for shard in self.shards) + self._rows

    def write(self, batch: pa.RecordBatch) -> None:
        if self._file is not None and self._file.size >= self._max_bytes:
            self.end_shard()
        self._begin_shard().write(batch)
        self._rows += batch.num_rows

    def adopt(self, path: Path, shard: Shard) -> None:
        """Takes a finished file in as the next shard, without copying it."""
        self.end_shard()
        name = self._next_name()
        self._folder.mkdir(exist_ok=True)
        durable.link(path, self._folder / name)
        self.shards.append(Shard(name, shard.rows, shard.size, shard.sha256, shard.ends))

    def end_shard(self) -> None:
        """What follows begins a new file."""
        if self._file is None or self._stream is None:
            return
        self._stream.close()
        self._file.close()
        self.shards.append(
            Shard(
                self._file.path.name,
                self._rows,
                self._file.size,
                self._file.hash.hexdigest(),
                tuple(self._stream.ends),
            )
        )
        self._file, self._stream, self._rows = None, None, 0

    def close(self) -> list[Shard]:
        """Ends the last file; there is always one, if without rows."""
        if not self.shards:
            self._begin_shard()
        self.end_shard()
        return self.shards

    def abandon(self) -> None:
        """Lets the file at hand go: it is about to be thrown away."""
        if self._file is not None:
            self._file.abandon()

    def _begin_shard(self) -> _ArrowStream | _ParquetStream:
        if self._stream is None:
            self._folder.mkdir(exist_ok=True)
            self._file = _HashedFile(self._folder / self._next_name())
            stream = _ArrowStream if self.form == ARROW else _ParquetStream
            self._stream = stream(self._file, self._schema)
        return self._stream

    def _next_name(self) -> str:
        return f"{self._prefix}{len(self.shards):05d}.{self.form}"
