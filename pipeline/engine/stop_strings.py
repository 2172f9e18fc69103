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
        self._ids: list[int] = []
        self._context = 0  # ids from here on give the new ones their context
        self._read = 0  # ids before this one are part of `text`
        self._floor = 0  # a stop string must end behind this character
        self.text = ""
        self.found_at: int | None = None

    def feed(self, token: int, min_tokens: int = 0) -> bool:
        """Take the next completion id; True if a stop string ends with it.

        A string that ends before the completion has min_tokens tokens does not count.
        """
        self._ids.append(token)
        before = self._decode(self._ids[self._context : self._read])
        after = self._decode(self._ids[self._context :])
        # Half a character may still become a whole one; what stands before it is settled.
        settled = after.rstrip(_INCOMPLETE)
        text = self.text + settled[len(before) :]
        if len(self._ids) < min_tokens:
            self._floor = len(text)
        elif hits := [at for s in self._stop if (at := self._find(s, text)) is not None]:
            self.text, self.found_at = text, min(hits)
            return True
        if settled == after and len(after) > len(before):
            self.text = text
            self._context, self._read = self._read, len(self._ids)
        return False

    def _find(self, stop: str, text: str) -> int | None:
        """Where `stop` begins in `text`, if it ends in what is new."""
        newer_than = max(len(self.text), self._floor)
        at = text.find(stop, max(newer_than - len(stop) + 1, 0))
        return at if at >= 0 else None
