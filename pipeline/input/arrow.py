"""Arrow IPC files, in both formats, told apart by their first bytes.

A block is a record batch. Both formats are the same row of messages (the file format adds a magic
word before and a footer behind), so one walk over the messages' headers counts rows and finds
batches without reading a byte of their data. The layout of headers is Arrow's Message.fbs:
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from struct import error as StructError
from struct import unpack_from
from typing import ClassVar, NamedTuple

import pyarrow as pa

from pipeline.input.files import FileSource, Scanned
from pipeline.input.source import Block, InputFile

_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
# Most headers are shorter, so one read brings a whole header.
_HEADER_BYTES = 4096


class _Kind(IntEnum):
    SCHEMA = 1
    DICTIONARY = 2
    BATCH = 3


class _Message(NamedTuple):
    """start, stop: its bytes in the file, data included. num_rows: 0 for what is not a batch."""

    kind: int
    start: int
    stop: int
    num_rows: int


class ArrowFiles(FileSource):
    kind: ClassVar[str] = "Arrow IPC"
    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".arrows", ".feather", ".ipc")

    def scan_file(self, file: pa.NativeFile, path: str) -> Scanned:
        batches = [message for message in _messages(file) if message.kind == _Kind.BATCH]
        if _is_file_format(file):
            schema = pa.ipc.open_file(file).schema
            return Scanned([(batch.num_rows, number) for number, batch in enumerate(batches)], schema)
        file.seek(0)
        schema = pa.ipc.open_stream(file).schema
        return Scanned([(batch.num_rows, batch.start) for batch in batches], schema)

    def read_block(self, file: InputFile, block: Block, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        assert block.locator is not None
        # Mapped: of a batch that is not compressed, only the columns looked at are ever read.
        with self.open(file.path, memory_map=True) as source:
            if _is_file_format(source):
                names = pa.ipc.open_file(source).schema.names
                options = pa.ipc.IpcReadOptions(included_fields=[names.index(name) for name in columns])
                yield pa.ipc.open_file(source, options=options).get_batch(block.locator)
            else:
                yield _stream_batch(source, block.locator)


def _stream_batch(source: pa.NativeFile, start: int) -> pa.RecordBatch:
    """The batch whose message begins at `start`."""
    source.seek(0)
    schema = pa.ipc.read_schema(source)
    if not any(_has_dictionary(column.type) for column in schema):
        source.seek(start)
        return pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)
    # Its dictionaries lie anywhere before it. A stream of nothing but the schema, those and the
    # batch is a valid stream; pyarrow offers no other way to give a batch its dictionaries.
    needed = []
    for message in _messages(source):
        if message.start >= start:
            needed.append(message)
            break
        if message.kind != _Kind.BATCH:
            needed.append(message)
    parts = [source.read_at(message.stop - message.start, message.start) for message in needed]
    return pa.ipc.open_stream(pa.py_buffer(b"".join(parts))).read_next_batch()


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(number).type) for number in range(kind.num_fields))


def _is_file_format(file: pa.NativeFile) -> bool:
    return file.read_at(min(len(_MAGIC), file.size()), 0) == _MAGIC


def _messages(file: pa.NativeFile) -> Iterator[_Message]:
    """The messages of either format, in turn, up to the end mark or the end of the data.

    Raises EOFError for a message cut short: half a file must not pass for a shorter one.
    """
    start, end = 0, file.size()
    if _is_file_format(file):
        start = 8
        footer = unpack_from("<i", file.read_at(10, end - 10))[0] if end >= 24 else 0
        if footer <= 0 or file.read_at(6, end - 6) != _MAGIC:
            raise EOFError("its footer is missing, so it was never finished")
        end -= 10 + footer
    elif not end:
        raise EOFError("it is empty; even an Arrow stream without rows has a schema")
    while start < end:
        head = file.read_at(min(_HEADER_BYTES, end - start), start)
        # Before Arrow 0.15 the length stood alone.
        prefix = 8 if head[:4] == _CONTINUATION else 4
        if len(head) < prefix:
            raise EOFError(f"it is cut short at byte {end}")
        length = unpack_from("<i", head, prefix - 4)[0]
        if length == 0:
            return
        if length < 0 or start + prefix + length > end:
            raise EOFError(f"it is cut short, or not Arrow, at byte {start} of {end}")
        if prefix + length > len(head):
            head = file.read_at(prefix + length, start)
        kind, body, num_rows = _header(memoryview(head)[prefix : prefix + length])
        stop = start + prefix + length + body
        if stop > end:
            raise EOFError(f"it is cut short: its batch at byte {start} ends at {stop}, the file at {end}")
        yield _Message(kind, start, stop, num_rows)
        start = stop


def _header(buffer: memoryview) -> tuple[int, int, int]:
    """(kind, bytes of data, number of rows) of a message, from its flatbuffer."""
    try:
        message = unpack_from("<I", buffer, 0)[0]
        kind_at, header_at, body_at = (_field(buffer, message, number) for number in (1, 2, 3))
        kind = buffer[kind_at] if kind_at else 0
        body = unpack_from("<q", buffer, body_at)[0] if body_at else 0
        if kind != _Kind.BATCH or header_at is None:
            return kind, body, 0
        header = header_at + unpack_from("<I", buffer, header_at)[0]
        rows_at = _field(buffer, header, 0)
        return kind, body, unpack_from("<q", buffer, rows_at)[0] if rows_at else 0
    except (IndexError, StructError) as error:
        raise OSError("it is not Arrow, or damaged") from error


def _field(buffer: memoryview, table: int, number: int) -> int | None:
    """Where the field of a flatbuffer table lies; None when it has its default value."""
    vtable = table - unpack_from("<i", buffer, table)[0]
    slot = 4 + 2 * number
    if slot >= unpack_from("<H", buffer, vtable)[0]:
        return None
    offset = unpack_from("<H", buffer, vtable + slot)[0]
    return table + offset if offset else None
