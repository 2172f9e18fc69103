"""One line that tells how a job stands: redrawn on a terminal, printed again and again to a log.

Knows: the stream it is shown on. Refuses to know: what it says.
"""

from __future__ import annotations

import sys
from typing import TextIO

_ERASE = "\r\x1b[K"


class StatusLine:
    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._shown = ""

    def show(self, text: str) -> None:
        """The new state; where nothing can be redrawn, only if it differs from the last."""
        if self._is_terminal:
            print(f"{_ERASE}{text}", end="", file=self._stream, flush=True)
        elif text != self._shown:
            print(text, file=self._stream, flush=True)
        self._shown = text

    def say(self, text: str) -> None:
        """Something that stays, above the line."""
        erase = _ERASE if self._is_terminal and self._shown else ""
        print(f"{erase}{text}", file=self._stream, flush=True)
        if erase:
            self.show(self._shown)

    def end(self) -> None:
        if self._is_terminal and self._shown:
            print(file=self._stream, flush=True)
        self._shown = ""
