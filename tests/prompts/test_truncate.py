from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_fakes import byte_fallback, byte_level, tiny

from pipeline.prompts.tokenizer import TextEncoder
from pipeline.prompts.truncate import cut_ids, cut_tokens, line_pieces, longest_fit, token_pieces

TOKENIZERS = {
    "tiny": tiny(),
    "bos": byte_level(bos=True),
    "fallback": byte_fallback(),
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(alphabet="hi the\n🎉é漢", min_size=1, max_size=30), limit=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_a_cut_never_tears_a_character(name: str, text: str, limit: int) -> None:
    encoder = TextEncoder(TOKENIZERS[name])
    tokens = encoder.encode_with_spans(text)
    np.testing.assert_array_equal(tokens.ids, encoder.encode([text])[0])
    if len(tokens.ids) <= limit:
        return
    front = encoder.num_opening(tokens.ids)
    for left in (False, True):
        kept, kept_text = cut_tokens(tokens, text, limit, front, left)
        body = kept[front:]
        assert len(kept) <= max(limit, front)
        assert kept[:front].tolist() == tokens.ids[:front].tolist()
        assert "\ufffd" not in encoder.decode(body)
        assert text.endswith(kept_text) if left else text.startswith(kept_text)
        # Nothing more than the torn character is lost: at most three of the limit's ids are unused.
        assert len(kept) >= limit - 4
        if name != "fallback" and len(body):
            # Byte-level ids say exactly which text they stand for.
            assert encoder.decode(body) == kept_text


def test_a_cut_inside_an_emoji_takes_the_whole_emoji() -> None:
    encoder = TextEncoder(tiny())
    text = "ab🎉"
    tokens = encoder.encode_with_spans(text)
    size = len(tokens.ids)
    assert size >= 5  # the emoji takes several ids
    for limit in range(size - 3, size):
        kept, kept_text = cut_tokens(tokens, text, limit, 0, left=False)
        assert kept_text == "ab"
        assert encoder.decode(kept) == "ab"


def test_left_cut_keeps_a_bos_that_the_text_spells_out() -> None:
    encoder = TextEncoder(byte_level(bos=True))
    text = "<s>one two three four"
    tokens = encoder.encode_with_spans(text)
    kept, kept_text = cut_tokens(tokens, text, 3, encoder.num_opening(tokens.ids), left=True)
    assert kept[0] == 0
    assert len(kept) == 3
    assert kept_text.startswith("<s>")
    assert text.endswith(kept_text.removeprefix("<s>"))


@pytest.mark.parametrize("left", [False, True])
def test_ids_without_text_are_cut_between_characters(left: bool) -> None:
    encoder = TextEncoder(tiny())
    ids = encoder.encode(["🎉🎉🎉🎉"])[0]
    assert len(ids) % 4 == 0
    for limit in range(4, len(ids)):
        kept = cut_ids(ids, limit, 0, left, encoder.decode)
        assert len(kept) == limit // 4 * 4
        assert "\ufffd" not in encoder.decode(kept)


def test_ids_that_were_never_text_are_cut_at_the_limit() -> None:
    encoder = TextEncoder(tiny())
    half = encoder.encode(["🎉"])[0][:1]
    ids = np.repeat(half, 9)
    assert len(cut_ids(ids, 7, 0, False, encoder.decode)) == 7


def test_lines_are_kept_whole_without_the_break_at_the_cut() -> None:
    text = "first\r\nsecond\n\nlast"
    right, left = line_pieces(text, left=False), line_pieces(text, left=True)
    assert len(right) == len(left) == 4
    assert [right.keep(count) for count in range(5)] == [
        "",
        "first",
        "first\r\nsecond",
        "first\r\nsecond\n",
        text,
    ]
    assert [left.keep(count) for count in range(5)] == ["", "last", "\nlast", "second\n\nlast", text]
    assert right.count_within(len("first\r\nsecond")) == 2
    assert right.count_within(len("first\r\nsecond") - 1) == 1
    assert left.count_within(len("last")) == 1
    assert left.count_within(len("last") - 1) == 0
    assert right.count_within(-5) == left.count_within(-5) == 0


@given(text=st.text(alphabet="hi the\n🎉é", max_size=40), left=st.booleans())
@settings(max_examples=60, deadline=None)
def test_pieces_make_up_the_text(text: str, left: bool) -> None:
    for tokenizer in TOKENIZERS.values():
        pieces = token_pieces(text, TextEncoder(tokenizer).encode_with_spans(text), left)
        assert pieces.keep(0) == ""
        assert pieces.keep(len(pieces)) == text
        kept = [len(pieces.keep(count)) for count in range(len(pieces) + 1)]
        assert kept == sorted(set(kept))


@given(
    steps=st.lists(st.integers(1, 6), min_size=1, max_size=80),
    limit=st.integers(0, 300),
    guess=st.integers(-50, 200),
)
@settings(deadline=None)
def test_longest_fit_is_the_largest_of_a_rising_length(steps: list[int], limit: int, guess: int) -> None:
    lengths = np.cumsum([3, *steps]).tolist()
    limit = min(limit, lengths[-1] - 1)
    fitting = [count for count, size in enumerate(lengths) if size <= limit]
    assert longest_fit(len(steps), guess, lengths.__getitem__, limit) == (max(fitting) if fitting else None)


def test_longest_fit_looks_past_a_seam_that_does_not_merge() -> None:
    # Four pieces fit only because the fourth merges with what follows it.
    lengths = [5, 6, 7, 9, 8, 10, 11]
    assert longest_fit(6, 2, lengths.__getitem__, 8) == 4


def test_longest_fit_asks_little_near_a_good_guess_and_ends_with_any_length() -> None:
    asked: list[int] = []

    def length(count: int) -> int:
        asked.append(count)
        return count

    assert longest_fit(1_000_000, 7_990, length, 8_000) == 8_000
    assert len(asked) < 20
    asked.clear()
    assert longest_fit(1_000_000, 0, length, 900_000) == 900_000
    assert len(asked) < 60
    # Ignores its argument: everything fits but the whole.
    assert longest_fit(50, 10, lambda count: 0, 5) == 49
    assert longest_fit(50, 10, lambda count: 9, 5) is None
