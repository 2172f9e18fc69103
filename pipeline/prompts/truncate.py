"""Where an over-long prompt may be cut, and how much of it stays.

Knows: character spans of tokens, lines, and the search for the longest text that fits. Pure: no
tokenizer, no template; lengths come from a function. Refuses to know what a chat is.

Shapes: P = tokens of a prompt, T = tokens of one text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.prompts.tokenizer import Tokens

# How far tokens that merge at a seam can make a longer text have fewer tokens.
_SEAM = 4
# UTF-8 writes a character in at most four bytes, so a cut leaves at most three of them behind.
_MAX_DANGLING = 3


def cut_tokens(tokens: Tokens, text: str, limit: int, keep_front: int, left: bool) -> tuple[np.ndarray, str]:
    """Drops ids from the left (after the first keep_front) or the right -> ids [<= limit], their text.

    Cuts only between two characters: where a character takes several ids, all of them stay or go.
    Nothing of the text may be left; then ids has at most keep_front entries.
    """
    ids, starts, ends = tokens.ids, tokens.starts, tokens.ends
    room = max(limit - keep_front, 0)
    assert len(ids) > limit
    if left:
        cut = len(ids) - room
        while cut < len(ids) and starts[cut] < ends[cut - 1]:
            cut += 1
        front_end = int(ends[keep_front - 1]) if keep_front else 0
        kept_text = text[:front_end] + (text[int(ends[cut - 1]) :] if cut < len(ids) else "")
        return np.concatenate([ids[:keep_front], ids[cut:]]), kept_text
    cut = keep_front + room
    while cut > keep_front and starts[cut] < ends[cut - 1]:
        cut -= 1
    return ids[:cut], text[: int(ends[cut - 1]) if cut else 0]


def cut_ids(
    ids: np.ndarray, limit: int, keep_front: int, left: bool, decode: Callable[[np.ndarray], str]
) -> np.ndarray:
    """The same for ids that came without a text: at most three more go where a character would be torn."""
    room = max(limit - keep_front, 0)
    front, back = ids[:keep_front], ids[len(ids) - room :] if left else ids[keep_front : keep_front + room]
    for dropped in range(min(_MAX_DANGLING + 1, len(back))):
        kept = back[dropped:] if left else back[: len(back) - dropped]
        edge = decode(kept[:8] if left else kept[-8:])
        if not (edge.startswith("\ufffd") if left else edge.endswith("\ufffd")):
            return np.concatenate([front, kept])
    # The ids were not UTF-8 to begin with: there is no better place.
    return np.concatenate([front, back])


@dataclass(frozen=True)
class Pieces:
    """A text in n pieces (tokens or lines), to be shortened by whole ones.

    bounds: n + 1 ascending positions in the text, from 0 to its end.
    """

    text: str
    bounds: tuple[int, ...]
    left: bool

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def keep(self, count: int) -> str:
        """The last `count` pieces when cut from the left, otherwise the first."""
        return self.text[self.bounds[len(self) - count] :] if self.left else self.text[: self.bounds[count]]

    def count_within(self, num_characters: int) -> int:
        """How many whole pieces have at most that many characters."""
        if self.left:
            return sum(1 for bound in self.bounds[:-1] if len(self.text) - bound <= num_characters)
        return max(bisect_right(self.bounds, num_characters) - 1, 0)


def token_pieces(text: str, tokens: Tokens, left: bool) -> Pieces:
    """Pieces end where a token does, and only between two characters.

    The end of the one token, not the start of the next: many tokenizers leave a space out of the
    span of the token it belongs to, and it must go with that token.
    """
    whole = tokens.starts[1:] >= tokens.ends[:-1]
    ends = set(tokens.ends[:-1][whole].tolist())
    return Pieces(text, tuple(sorted(ends | {0, len(text)})), left)


def line_pieces(text: str, left: bool) -> Pieces:
    """Pieces are lines. The line break at the cut goes: what follows in the template stays in place."""
    breaks = list(re.finditer(r"\r?\n", text))
    inner = [match.end() if left else match.start() for match in breaks]
    return Pieces(text, (0, *inner, len(text)), left)


def longest_fit(num_pieces: int, guess: int, length: Callable[[int], int], limit: int) -> int | None:
    """The largest count of pieces with length(count) <= limit; None when not even 0 pieces fit.

    All pieces are known not to fit. length(count) is the true number of tokens, and rises with the
    count except for a few tokens that merge at the seams. It is costly: so the search starts at a
    guess, doubles its steps until it has the answer between two counts, then halves; a last look
    beyond finds a longer text that merging made fit. Ends after O(log num_pieces) calls.
    """
    low, high = -1, num_pieces
    probe, step = min(max(guess, 0), num_pieces - 1), 1
    while high - low > 1:
        if length(probe) <= limit:
            low = probe
        else:
            high = probe
        if low >= 0 and high < num_pieces:
            probe = (low + high) // 2
        else:
            probe = min(low + step, high - 1) if low >= 0 else max(high - step, 0)
        step *= 2
    if low < 0:
        return None
    for ahead in range(high + 1, min(high + 1 + _SEAM, num_pieces)):
        size = length(ahead)
        if size > limit + _SEAM:
            break
        if size <= limit:
            low = ahead
    return low
