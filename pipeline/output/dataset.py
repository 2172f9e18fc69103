"""A finished dataset: its files' names, the metadata that `datasets` opens it by, and how it is read back.

Knows: both forms, and how pieces become one folder. Refuses to know: parts, units, journals. No byte here
depends on anything but the schema, the rows, where pieces begin, and the size of shards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import durable
from pipeline.output.schema import PROVENANCE
from pipeline.output.shards import ARROW, BATCH_ROWS, PARQUET, Shard, ShardWriter

_STATE = "state.json"
_INFO = "dataset_info.json"
_PREFIX = "data-"


class DatasetFormat(str, Enum):
    arrow = "arrow"
    parquet = "parquet"
    both = "both"

    @property
    def forms(self) -> tuple[str, ...]:
        return (ARROW, PARQUET) if self is DatasetFormat.both else (self.value,)


@dataclass(frozen=True)
class Sharding:
    """How rows are cut into files. Raises ValueError for what cannot be.

    shard_bytes: a file that has grown so large is ended. range_rows: a new file begins with the unit that
    comes first after each multiple of so many results; what lies between is published as one.
    """

    form: DatasetFormat = DatasetFormat.arrow
    shard_bytes: int = 512 * 2**20
    range_rows: int = 2**17

    def __post_init__(self) -> None:
        for option, value in (("--shard-bytes", self.shard_bytes), ("--range-rows", self.range_rows)):
            if value < 1:
                raise ValueError(f"{option}={value} leaves no room for a row: give a number above 0")

    def options(self) -> str:
        """As they are given on a command line."""
        return f"--format {self.form.value} --shard-bytes {self.shard_bytes} --range-rows {self.range_rows}"


@dataclass(frozen=True)
class ReadyPiece:
    """A piece whose files lie there as they are to be: path and shard, by form."""

    files: Mapping[str, Sequence[tuple[Path, Shard]]]


Piece: TypeAlias = ReadyPiece | Iterable[pa.RecordBatch]


def write_dataset(
    folder: Path, schema: pa.Schema, pieces: Iterable[Piece], sharding: Sharding, identity: str
) -> tuple[int, list[Path]]:
    """Writes rows and metadata into a new folder; returns the number of rows and the data files.

    Each piece begins new files. identity: what the dataset is, as a hash; `datasets` keys its caches by it.
    """
    folders = {ARROW: folder, PARQUET: folder / PARQUET}
    writers = [
        ShardWriter(folders[form], schema, form, sharding.shard_bytes, _PREFIX)
        for form in sharding.form.forms
    ]
    try:
        for piece in pieces:
            _write_piece(writers, piece)
        files = [_name_files(folders[writer.form], writer.close()) for writer in writers]
    except BaseException:
        for writer in writers:
            writer.abandon()
        raise
    if ARROW in sharding.form.forms:
        _write_metadata(folder, [path.name for path in files[0]], identity)
    return writers[0].num_rows, [path for paths in files for path in paths]


def _write_piece(writers: list[ShardWriter], piece: Piece) -> None:
    if isinstance(piece, ReadyPiece):
        for writer in writers:
            for path, shard in piece.files[writer.form]:
                writer.adopt(path, shard)
        return
    for batch in piece:
        for writer in writers:
            writer.write(batch)
    for writer in writers:
        writer.end_shard()


def _name_files(folder: Path, shards: list[Shard]) -> list[Path]:
    """Gives shards their last names, which say how many there are."""
    final = []
    for number, shard in enumerate(shards):
        suffix = shard.name.rpartition(".")[2]
        final.append(folder / f"{_PREFIX}{number:05d}-of-{len(shards):05d}.{suffix}")
        durable.rename(folder / shard.name, final[-1])
    durable.fsync_directory(folder)
    return final


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
    if (folder / PARQUET).is_dir():
        paths = tuple(sorted((folder / PARQUET).glob("*.parquet")))
        found.append(DatasetFiles(paths, DatasetFormat.parquet))
    for files in found:
        missing = [str(path) for path in files.paths if not path.exists()]
        if missing or not files.paths:
            raise ValueError(f"{folder} lacks {', '.join(missing) or 'its Parquet files'}")
    if not found:
        raise ValueError(f"{folder} holds no dataset")
    return found
