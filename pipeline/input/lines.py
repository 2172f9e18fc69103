"""Lines of text files as bytes: where they begin, which are blank, what lies inside .gz and .zst files.

Knows: line ends, compressed members. Refuses to know: JSON.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import zstandard

CHUNK_BYTES = 2 * 2**20
# Small, because a compressed byte can become a thousand.
PACKED_CHUNK_BYTES = 64 * 2**10

_NEWLINE = ord("\n")


def row_starts(chunks: Iterator[bytes]) -> Iterator[np.ndarray]:
    """The byte offsets at which rows begin: int64, an array per chunk. Holds one chunk at a time."""
    base = line_start = 0
    open_line_blank = True  # of the line that reaches into the next chunk, as far as seen
    for chunk in chunks:
        data = np.frombuffer(chunk, np.uint8)
        ends = np.flatnonzero(data == _NEWLINE)
        if len(ends):
            starts = np.empty(len(ends), np.int64)
            starts[0] = line_start
            starts[1:] = base + ends[:-1] + 1
            keep = np.ones(len(ends), bool)
            keep[0] = not (open_line_blank and is_blank(chunk[: ends[0]]))
            # Few lines begin with white space, and only those can be blank.
            for line in np.flatnonzero(data[ends[:-1] + 1] <= ord(" ")):
                keep[line + 1] = not is_blank(chunk[ends[line] + 1 : ends[line + 1]])
            yield starts[keep]
            line_start, open_line_blank = base + int(ends[-1]) + 1, True
        open_line_blank = open_line_blank and is_blank(chunk[line_start - base if len(ends) else 0 :])
        base += len(chunk)
    if not open_line_blank:
        yield np.array([line_start], np.int64)


def chunks_of(file: pa.NativeFile, unpack: Callable[[], Any] | None) -> Iterator[bytes]:
    """The file's bytes from the start, decompressed member after member."""
    file.seek(0)
    if unpack is None:
        yield from iter(lambda: file.read(CHUNK_BYTES), b"")
        return
    member, begun = unpack(), False
    for packed in iter(lambda: file.read(PACKED_CHUNK_BYTES), b""):
        while packed:
            try:
                data = member.decompress(packed)
            except (zlib.error, zstandard.ZstdError) as error:
                raise OSError(str(error)) from error
            if data:
                yield data
            begun, packed = True, b""
            if member.eof:
                # The next member follows; zeros are padding, as gzip has it.
                packed, member, begun = member.unused_data.lstrip(b"\0"), unpack(), False
    # zstandard itself says nothing when a file is cut short, and its rows would be missing.
    if begun:
        raise EOFError("its compressed data is cut short")


def decompressor(file: pa.NativeFile) -> Callable[[], Any] | None:
    """What makes a decompressor for one member of this file; None for a plain file."""
    magic = file.read_at(min(4, file.size()), 0)
    if magic[:2] == b"\x1f\x8b":
        return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    if magic == b"\x28\xb5\x2f\xfd":
        # The window of `zstd --long=31` and of everything smaller.
        return lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
    return None


def row_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The lines that are rows."""
    return (line for line in lines_of(chunks) if not is_blank(line))


def lines_of(chunks: Iterator[bytes]) -> Iterator[bytes]:
    unfinished: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        unfinished.append(first)
        if others:
            yield b"".join(unfinished)
            yield from others[:-1]
            unfinished = others[-1:]
    yield b"".join(unfinished)


def is_blank(line: bytes) -> bool:
    return not line.strip()
