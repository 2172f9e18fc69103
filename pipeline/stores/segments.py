"""A file that grows, where nothing can be appended to: immutable objects, named by where they begin.

Knows: their names, their order, and that bytes wait here until their object was seen there. Refuses to
know: how objects are stored.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import IO, NamedTuple

# Enough for 100 TB, so that names sort as numbers do.
_DIGITS = 15


class Segment(NamedTuple):
    """An object that holds bytes `start` to `stop` of a file."""

    start: int
    stop: int

    @property
    def name(self) -> str:
        return segment_name(self.start)


def segment_name(start: int) -> str:
    return f"{start:0{_DIGITS}d}"


def in_order(found: Iterable[tuple[str, int]], url: str) -> list[Segment]:
    """The segments of (name, size). Raises OSError if one is missing between others."""
    segments, end = list[Segment](), 0
    for start, size in sorted((int(name), size) for name, size in found):
        if start != end:
            raise OSError(errno.EIO, f"no object begins at byte {end}", url)
        end += size
        segments.append(Segment(start, end))
    return segments


class SegmentFile:
    """An AppendFile: bytes wait in a local file, and go up as one object at each sync."""

    def __init__(self, put: Callable[[str, bytes], None], staged: IO[bytes]) -> None:
        """put: makes an object of that name, and returns once it was seen, whole."""
        self._put = put
        self._staged = staged
        self._start = 0

    def write(self, data: bytes | memoryview) -> None:
        self._staged.write(data)

    def sync(self) -> None:
        self._staged.seek(0)
        data = self._staged.read()
        if not data:
            return
        self._put(segment_name(self._start), data)
        self._start += len(data)
        # only now: until the object was seen, these bytes were the only ones
        self._staged.seek(0)
        self._staged.truncate()

    def sync_name(self) -> None:
        """An object and its name are one."""

    def close(self) -> None:
        self._staged.close()
