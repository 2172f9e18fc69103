"""What every input offers: an index of its rows, and blocks that can be read alone.

Knows: files, blocks, the index and its form on disk, and which class reads which configuration.
Refuses to know: formats, file systems, the order in which rows are wanted (that is `order.py`).
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from pipeline import durable
from pipeline.config import ArrowSource, HFSource, JsonlSource, ParquetSource, SourceConfig, mapping

# Rows in a batch at most: what a reader holds in memory follows from it.
BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Block:
    """The smallest range of rows a source can seek to.

    file: index of its file. first_row: its first row's number in that file. locator: where it lies,
    in the source's own terms (a Parquet row group, an IPC batch or its byte offset, the byte offset
    of a line); None: it is a whole file that can only be read from its start, such as a .gz file.
    """

    file: int
    first_row: int
    num_rows: int
    locator: int | None


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input. digest: of its content (head and tail or a sample), never of its times."""

    index: int
    path: str
    size: int
    digest: str
    num_rows: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class InputIndex:
    """Every file and block of the input, in file order, and the schema of all columns.

    metadata: what pins the input beside its files, such as the `revision` of a hub dataset.
    """

    files: tuple[InputFile, ...]
    schema: pa.Schema
    metadata: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for file in self.files for block in file.blocks)

    @cached_property
    def num_rows(self) -> int:
        return sum(file.num_rows for file in self.files)

    @cached_property
    def digest(self) -> str:
        """One hash of sizes, contents and columns; without the paths, since data gets moved."""
        text = [f"{file.size} {file.digest} {file.num_rows}" for file in self.files]
        text += [f"{column.name}: {column.type}" for column in self.schema]
        text += [f"{key}={value}" for key, value in sorted(self.metadata.items())]
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    def require(self, columns: Iterable[str], key: str) -> None:
        """Raise ValueError if the setting `key` asks for a column that the input does not have."""
        missing = [name for name in columns if name not in self.schema.names]
        if missing:
            raise ValueError(
                f"{key} asks for column {', '.join(missing)}, which the input does not have: "
                f"its columns are {', '.join(self.schema.names) or 'none'}"
            )

    def save(self, path: str | Path) -> None:
        """Write the index so that it is either all there under `path` or not at all."""
        durable.atomic_write(Path(path), self.encode())

    def encode(self) -> bytes:
        schema = base64.b64encode(self.schema.serialize().to_pybytes())
        table = pa.table(
            {
                "path": pa.array([file.path for file in self.files], pa.large_string()),
                "size": pa.array([file.size for file in self.files], pa.int64()),
                "digest": pa.array([file.digest for file in self.files], pa.string()),
                "block_rows": pa.array(
                    [[block.num_rows for block in file.blocks] for file in self.files],
                    pa.large_list(pa.int64()),
                ),
                "locators": pa.array(
                    [[block.locator for block in file.blocks] for file in self.files],
                    pa.large_list(pa.int64()),
                ),
            },
            metadata={"schema": schema, **{f"pin.{key}": text for key, text in self.metadata.items()}},
        )
        out = pa.BufferOutputStream()
        with pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
        data: bytes = out.getvalue().to_pybytes()
        return data

    @classmethod
    def load(cls, path: str | Path) -> InputIndex:
        return cls.decode(Path(path).read_bytes())

    @classmethod
    def decode(cls, data: bytes) -> InputIndex:
        table = pa.ipc.open_file(pa.py_buffer(data)).read_all()
        metadata = {key.decode(): text.decode() for key, text in table.schema.metadata.items()}
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(metadata.pop("schema"))))
        columns = table.to_pydict()
        files = [
            input_file(index, path, size, digest, zip(rows, locators, strict=True))
            for index, (path, size, digest, rows, locators) in enumerate(zip(*columns.values(), strict=True))
        ]
        return cls(tuple(files), schema, {key.removeprefix("pin."): text for key, text in metadata.items()})


def input_file(
    index: int, path: str, size: int, digest: str, blocks: Iterable[tuple[int, int | None]]
) -> InputFile:
    """A file from its blocks as (number of rows, locator) in row order; empty blocks are left out."""
    placed: list[Block] = []
    first_row = 0
    for num_rows, locator in blocks:
        if num_rows:
            placed.append(Block(index, first_row, num_rows, locator))
        first_row += num_rows
    return InputFile(index, path, size, digest, first_row, tuple(placed))


class Source(Protocol):
    """An input that can be indexed once and read a block at a time.

    Every method raises ValueError with a message for the user: what is wrong, in which file.
    """

    def scan(self) -> InputIndex:
        """Index the input, its files sorted by path. Of a source opened with an index, that index,
        with files that came later behind it when `source.allow_append` lets them."""

    def check(self, index: InputIndex) -> None:
        """Raise ValueError, with the differences, unless the input still is what `index` says."""

    def read(self, block: Block, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of one block, in order, in batches of at most BATCH_ROWS, with `columns` in the
        order given and typed as in the index's schema. Opens nothing but that block."""


def absolute(config: SourceConfig) -> SourceConfig:
    """The same source wherever it is opened from: its local paths from the root on.

    URLs stay, and so does a path of source=hf unless a folder of that name is there.
    """

    def from_root(path: Any) -> Any:
        if not isinstance(path, str):
            return [from_root(one) for one in path] if isinstance(path, list | tuple) else path
        path = os.path.expanduser(path)
        is_name = isinstance(config, HFSource) and not os.path.exists(path)
        return path if "://" in path or is_name else os.path.abspath(path)

    path = getattr(config, "path", None)
    return config if path is None else dataclasses.replace(config, path=from_root(path))  # type: ignore[call-arg]


def open_source(config: SourceConfig, index: InputIndex | None = None) -> Source:
    """The source that `config` describes; with the `index` of an earlier start, it need not scan.

    The readers are imported here, one at a time: a job on Parquet files never loads `datasets`.
    """
    if isinstance(config, ParquetSource | ArrowSource | JsonlSource):
        storage = mapping("source.storage_options", config.storage_options)
    if isinstance(config, ParquetSource):
        from pipeline.input.parquet import ParquetFiles

        return ParquetFiles(config.path, storage, index, config.allow_append)
    if isinstance(config, ArrowSource):
        from pipeline.input.arrow import ArrowFiles

        return ArrowFiles(config.path, storage, index, config.allow_append)
    if isinstance(config, JsonlSource):
        from pipeline.input.jsonl import JsonlFiles

        return JsonlFiles(
            config.path, storage, index, config.allow_append, mapping("source.schema", config.schema)
        )
    if isinstance(config, HFSource):
        from pipeline.input.hf import open_dataset

        return open_dataset(config, index)
    raise ValueError(
        "source has no kind: choose one of source=parquet, source=arrow, source=jsonl, source=hf"
    )
