"""Parquet files, read by row group through pyarrow and fsspec; `datasets` is never imported.

A block is a row group. Hive partition folders are read as plain folders: their names add no columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.input.files import FileSource, Scanned
from pipeline.input.source import BATCH_ROWS, Block, InputFile

# Bytes fetched at a time from each column of a row group: a big row group is streamed, never loaded
# whole. Larger than a disk needs, because a remote store charges a round trip for each.
COLUMN_BUFFER_BYTES = 2 * 2**20


class ParquetFiles(FileSource):
    kind: ClassVar[str] = "Parquet"
    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")

    # The last footer read: neighbouring blocks share it, and a footer can be megabytes long.
    _footer: tuple[str, pq.FileMetaData] | None = None

    def scan_file(self, file: pa.NativeFile, path: str) -> Scanned:
        parquet = pq.ParquetFile(file, pre_buffer=False)
        footer = parquet.metadata
        blocks: list[tuple[int, int | None]] = [
            (footer.row_group(number).num_rows, number) for number in range(footer.num_row_groups)
        ]
        return Scanned(blocks, parquet.schema_arrow)

    def read_block(self, file: InputFile, block: Block, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        kept = self._footer
        footer = kept[1] if kept and kept[0] == file.path else None
        with self.open(file.path) as source:
            parquet = pq.ParquetFile(
                source, metadata=footer, pre_buffer=False, buffer_size=COLUMN_BUFFER_BYTES
            )
            self._footer = (file.path, parquet.metadata)
            assert block.locator is not None
            # One thread: the rows are needed far slower than one core decodes them.
            yield from parquet.iter_batches(
                batch_size=BATCH_ROWS,
                row_groups=[block.locator],
                columns=list(columns),
                use_threads=False,
            )
