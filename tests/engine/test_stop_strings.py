"""Stop strings are found at the token that completes them, however the text is cut into tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes import PieceTokenizer, shipped_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from pipeline.engine.stop_strings import StopStringMatcher

PIECES = [
    b"a",
    b"b",
    b"ab",
    b"c",
    b" a",
    b"bca",
    b"\xc3",
    b"\xa9",
    b"\xe2\x82",
    b"\xac",
    b"a\xc3",
    b"\xff",
    b"",
]
STOPS = ["a", "ab", "abc", "ca", "b a", "é", "€b", "aé", "cc", "aaab", "bb"]
TOKENIZER = PieceTokenizer(PIECES)


def feed(pieces: Sequence[bytes], stops: Sequence[str], min_tokens: int = 0) -> tuple[int | None, str | None]:
    """Number of tokens up to the stop, and the text before it."""
    matcher = StopStringMatcher(stops, PieceTokenizer(pieces).decode)
    for i in range(len(pieces)):
        if matcher.feed(i, min_tokens):
            assert matcher.found_at is not None
            return i + 1, matcher.text[: matcher.found_at]
    assert matcher.found_at is None
    return None, None


@pytest.mark.parametrize(
    ("pieces", "stops", "found"),
    [
        ([b"one", b" END"], ["END"], (2, "one ")),
        ([b"o", b"ne E", b"N", b"D", b"x"], ["END"], (4, "one ")),
        ([b"aENDb"], ["END"], (1, "a")),
        ([b"END"], ["END"], (1, "")),
        ([b"EN", b"EN", b"D"], ["END"], (3, "EN")),
        ([b"x\n", b"\ny"], ["\n\n"], (2, "x")),
        ([b"ab"], ["b", "a"], (1, "")),
        ([b"abc", b"d"], ["d", "bcd"], (2, "a")),
        ([b"\xc3", b"\xa9", b"x"], ["\u00e9"], (2, "")),
        ([b"\xe2\x82", b"\xac!"], ["\u20ac!"], (2, "")),
        ([b"\xff", b"a", b"b"], ["ab"], (3, "\ufffd")),
        ([b"hello", b" world"], ["word"], (None, None)),
    ],
)
def test_where_a_stop_is_found(
    pieces: list[bytes], stops: list[str], found: tuple[int | None, str | None]
) -> None:
    assert feed(pieces, stops) == found


def test_a_stop_before_half_a_character_is_found_at_once() -> None:
    """Byte-level tokens do end in half a character; the stop in front of it is complete already."""
    assert feed([b"ab\xe2\x80", b"\x9d"], ["ab"]) == (1, "")


def test_min_tokens_ignores_what_ended_earlier() -> None:
    assert feed([b"END", b"x", b"END"], ["END"], min_tokens=2) == (3, "ENDx")
    # Completed by the second token: it ends when two tokens are there.
    assert feed([b"EN", b"D", b"x"], ["END"], min_tokens=2) == (2, "")


def test_min_tokens_ignores_a_short_stop_within_the_reach_of_a_long_one() -> None:
    assert feed([b"a", b"b", b"c"], ["a", "wxyz"], min_tokens=2) == (None, None)


@given(st.lists(st.sampled_from(PIECES[:6]), max_size=30), st.sets(st.sampled_from(STOPS), min_size=1))
def test_whole_characters_equal_decoding_everything_again(pieces: list[bytes], stops: set[str]) -> None:
    expected: tuple[int | None, str | None] = (None, None)
    for end in range(1, len(pieces) + 1):
        text = b"".join(pieces[:end]).decode()
        hits = [at for s in stops if (at := text.find(s)) >= 0]
        if hits:
            expected = (end, text[: min(hits)])
            break
    assert feed(pieces, sorted(stops)) == expected


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.sets(st.sampled_from(STOPS), min_size=1))
def test_broken_characters_never_hide_a_stop_for_good(pieces: list[bytes], stops: set[str]) -> None:
    """With a whole character behind them, all bytes before are settled."""
    pieces = [*pieces, b"z"]
    text = b"".join(pieces).decode("utf-8", errors="replace")
    there = [at for s in stops if (at := text.find(s)) >= 0]
    tokens, before = feed(pieces, sorted(stops))
    assert (tokens is not None) == bool(there)
    if there:
        assert before in {text[: text.find(s)] for s in stops if s in text}


def test_the_text_is_that_of_decoding_at_once() -> None:
    tokenizer = shipped_tokenizer()
    ids = tokenizer.encode("island, ocean, apple: 3 \u00e9 \u20ac \U0001f600 done.", add_special_tokens=False)
    matcher = StopStringMatcher(["never"], lambda part: tokenizer.decode(part, skip_special_tokens=True))
    assert not any(matcher.feed(i) for i in ids)
    assert matcher.text == tokenizer.decode(ids)


def test_the_cost_of_a_token_does_not_grow_with_the_row() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "".join(chr(97 + i % 26) for i in ids)

    matcher = StopStringMatcher(["!"], decode)
    assert not any(matcher.feed(i) for i in range(2_000))
    assert longest <= 4
    assert matcher.text == "".join(chr(97 + i % 26) for i in range(2_000))
