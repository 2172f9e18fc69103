"""JSON Lines: plain files by byte offset, .gz and .zst files (told by their first bytes) whole.

Types are never inferred from values: that is how rows get lost when a column is null here and a
number there. A column declared in `source.schema` has the type declared; any other is text, strings
as they are and other values as compact JSON. Which columns there are, the first row of each file
says; a key that a row lacks is null. Rows are the lines that are not blank; the scan looks for line
ends only and parses that one row per file.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from pipeline.input.arrow_types import parse_type
from pipeline.input.files import FileSource, Scanned
from pipeline.input.lines import chunks_of, decompressor, is_blank, lines_of, row_lines, row_starts
from pipeline.input.source import BATCH_ROWS, Block, InputFile, InputIndex

# A block ends at the row that reaches one of these.
BLOCK_ROWS = 1000
BLOCK_BYTES = 8 * 2**20

_BOM = b"\xef\xbb\xbf"
_TEXT = pa.large_string()


class JsonlFiles(FileSource):
    kind: ClassVar[str] = "JSON Lines"
    suffixes: ClassVar[tuple[str, ...]] = tuple(
        name + packed for name in (".jsonl", ".ndjson") for packed in ("", ".gz", ".zst")
    )

    def __init__(
        self,
        path: Any,
        storage_options: Mapping[str, Any] | None = None,
        index: InputIndex | None = None,
        allow_append: bool = False,
        schema: Mapping[str, str] | None = None,
    ):
        super().__init__(path, storage_options, index, allow_append)
        self.declared: dict[str, pa.DataType] = {}
        for name, text in (schema or {}).items():
            try:
                self.declared[name] = parse_type(text)
            except ValueError as error:
                raise ValueError(f"source.schema.{name}: {error}") from error

    def scan_file(self, file: pa.NativeFile, path: str) -> Scanned:
        unpack = decompressor(file)
        first = next(row_lines(chunks_of(file, unpack)), None)
        names = list(self._parse(path, 0, first)) if first is not None else []
        schema = pa.schema([(name, self.declared.get(name, _TEXT)) for name in names])
        starts = row_starts(chunks_of(file, unpack))
        if unpack is None:
            return Scanned(_blocks(starts), schema)
        return Scanned([(sum(map(len, starts)), None)], schema)

    def unite(self, schema: pa.Schema | None, other: pa.Schema, path: str) -> pa.Schema:
        """Files may have different keys: the columns are those of all of them, then the declared."""
        # A name has one type, declared or text, so files can differ only in which names they have.
        known = schema or pa.schema([])
        for column in [*other, *(pa.field(name, kind) for name, kind in self.declared.items())]:
            if column.name not in known.names:
                known = known.append(column)
        return known

    def field(self, schema: pa.Schema, name: str, path: str) -> pa.Field:
        """Any key may be asked for: the first rows need not have had it."""
        return schema.field(name) if name in schema.names else pa.field(name, self.declared.get(name, _TEXT))

    def read_block(self, file: InputFile, block: Block, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        fields = [self.field(pa.schema([]), name, file.path) for name in columns]
        with self.open(file.path) as source:
            if block.locator is None:
                chunks = chunks_of(source, decompressor(source))
            else:
                stop = _block_end(file, block)
                chunks = iter([source.read_at(stop - block.locator, block.locator)])
            rows = enumerate(row_lines(chunks), block.first_row)
            while lines := list(islice(rows, BATCH_ROWS)):
                yield self._batch(file.path, lines, fields)

    def _batch(self, path: str, lines: list[tuple[int, bytes]], fields: list[pa.Field]) -> pa.RecordBatch:
        records = [self._parse(path, row, line) for row, line in lines]
        if not fields:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * len(records), pa.struct([])))
        arrays = []
        for field in fields:
            values = [record.get(field.name) for record in records]
            try:
                arrays.append(self._array(field, values))
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                arrays.append(self._one_by_one(path, field, values, lines[0][0]))
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def _array(self, field: pa.Field, values: list[Any]) -> pa.Array:
        if field.name not in self.declared:
            values = [_as_text(value) for value in values]
        elif _written_as_text(field.type) and all(
            value is None or isinstance(value, str) for value in values
        ):
            return pa.array(values, pa.string()).cast(field.type)
        elif any(_has_fraction(value, field.type) for value in values):
            raise ValueError("it has a fraction")
        return pa.array(values, field.type)

    def _one_by_one(self, path: str, field: pa.Field, values: list[Any], first_row: int) -> pa.Array:
        """The column again after a failure, to mend lone surrogates and to find the row at fault."""
        pieces = []
        for row, value in enumerate(values, first_row):
            try:
                pieces.append(self._array(field, [_well_formed(value)]))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                shown = json.dumps(value)
                raise ValueError(
                    f"{path} line {self._line_number(path, row)}: column {field.name} has "
                    f"{shown[:80]}{'…' * (len(shown) > 80)}, which is no {field.type} ({error}); "
                    f"change source.schema.{field.name} or the file"
                ) from error
        return pa.concat_arrays(pieces)

    def _parse(self, path: str, row: int, line: bytes) -> dict[str, Any]:
        try:
            return _record(line, path, row + 1)
        except ValueError:
            # Blank lines are not rows but are lines: only now is the true number worth finding.
            return _record(line, path, self._line_number(path, row))

    def _line_number(self, path: str, row: int) -> int:
        """The line that holds a row, blank ones counted. Reads the file again: for messages only."""
        with self.open(path) as source:
            rows = 0
            for number, line in enumerate(lines_of(chunks_of(source, decompressor(source))), 1):
                rows += not is_blank(line)
                if rows > row:
                    return number
        raise AssertionError(f"{path} has no row {row}")


def _blocks(starts: Iterator[np.ndarray]) -> list[tuple[int, int | None]]:
    """Blocks as (number of rows, byte offset) from the offsets of all rows, taken chunk by chunk."""
    blocks: list[tuple[int, int | None]] = []
    begin, num_rows = 0, 0
    for offsets in starts:
        at = 0
        while at < len(offsets):
            if not num_rows:
                begin = int(offsets[at])
            # The rows that the block still takes: those that begin before either bound.
            room = int(np.searchsorted(offsets, begin + BLOCK_BYTES))
            stop = min(at + BLOCK_ROWS - num_rows, room)
            full = stop < len(offsets) or num_rows + stop - at == BLOCK_ROWS
            num_rows += stop - at
            at = stop
            if full:
                blocks.append((num_rows, begin))
                num_rows = 0
    if num_rows:
        blocks.append((num_rows, begin))
    return blocks


def _block_end(file: InputFile, block: Block) -> int:
    place = bisect.bisect_right(file.blocks, block.first_row, key=lambda other: other.first_row)
    after = file.blocks[place].locator if place < len(file.blocks) else file.size
    assert after is not None
    return after


def _record(line: bytes, path: str, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line.removeprefix(_BOM).decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {number} is not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} line {number} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} line {number} is a JSON {type(record).__name__}: a row is an object, {{…}}")
    return record


def _written_as_text(kind: pa.DataType) -> bool:
    """JSON has no such values; people write them as strings, which pyarrow parses in a cast only."""
    return pa.types.is_temporal(kind) or pa.types.is_decimal(kind)


def _has_fraction(value: Any, kind: pa.DataType) -> bool:
    """Whether an integer is to be made of 1.5 somewhere, which pyarrow would cut to 1 in silence."""
    if isinstance(value, float):
        return pa.types.is_integer(kind) and not value.is_integer()
    if isinstance(value, list) and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return any(_has_fraction(item, kind.value_type) for item in value)
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return any(_has_fraction(value.get(field.name), field.type) for field in kind)
    return False


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _well_formed(value: Any) -> Any:
    """The value with U+FFFD where a string has half of a surrogate pair, which JSON can say and
    UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_well_formed(item) for item in value]
    if isinstance(value, dict):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    return value
