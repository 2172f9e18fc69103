"""Finds stop strings in the text of a sequence while it grows, also across token borders.

Knows decoding and text; refuses to know the scheduler. Only sequences with stop strings pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

# What an unfinished UTF-8 sequence decodes to: the next token may still complete it.
_INCOMPLETE = "\ufffd"


class StopStringMatcher:
    """Feeds on one sequence's completion ids; `found_at` is where its text has to be cut.

    decode: ids -> text. The text grows by decoding a short tail of ids with and without the new
    ones and keeping the difference, so that a token's leading space survives; cost per token does
    not grow with the row.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self._stop = tuple(stop)
        self._decode = decode
        self._reach = max(len(s) for s in stop) - 1
        self._ids: list[int] = []
        self._context = 0  # ids from here on give the new ones their context
        self._read = 0  # ids before this one are part of `text`
        self.text = ""
        self.found_at: int | None = None

    def feed(self, token: int, min_tokens: int = 0) -> bool:
        """Take the next completion id; True if a stop string ends with it.

        A string that ends before the completion has min_tokens tokens does not count.
        """
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._read])
        after = self._decode(self._ids[self._context :])
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return False
        searched_from = max(0, len(self.text) - self._reach)
        self.text += after[len(before) :]
        self._context, self._read = self._read, len(self._ids)
        if len(self._ids) < min_tokens:
            return False
        hits = [at for s in self._stop if (at := self.text.find(s, searched_from)) >= 0]
        self.found_at = min(hits, default=None)
        return self.found_at is not None
