"""The tokenizer: how text becomes ids with exactly one BOS.

Knows: which ids a tokenizer puts in front of a text, and which characters each id stands for.
Refuses to know: how a tokenizer is loaded, where text comes from, and how long it may be.

Shapes: P = tokens of a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Tokens:
    """ids int32 [P] and the characters each stands for: starts, ends [P] (both 0 for ids added in front)."""

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class TextEncoder:
    """Text -> ids. What the tokenizer puts in front by default (BOS) comes exactly once.

    Ids that the tokenizer would put behind the text (EOS) are left out: a prompt is to be continued.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.num_ids = len(tokenizer)
        # This first call also settles the truncation and padding state that a tokenizer.json may
        # bring; later calls only read, so the engine's thread may decode at the same time.
        plain = self._plain(["a"])[0]
        opened = list(tokenizer("a")["input_ids"])
        starts = [i for i in range(len(opened)) if opened[i : i + len(plain)] == plain]
        self._opening = opened[: starts[0]] if starts else []
        self._bos = tokenizer.bos_token_id

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Several texts at once, which fast tokenizers do in parallel -> ids int32 [P] each."""
        return [np.array(self._opened(ids), np.int32) for ids in self._plain(list(texts))] if texts else []

    def encode_with_spans(self, text: str) -> Tokens:
        """One text with character spans; needs a fast tokenizer."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        ids = self._opened(encoded["input_ids"])
        num_added = max(len(ids) - len(spans), 0)
        # A BOS written twice in the text was dropped from the front.
        spans = spans[len(spans) + num_added - len(ids) :]
        spans = np.concatenate([np.zeros((num_added, 2), np.int64), spans])
        return Tokens(np.array(ids, np.int32), spans[:, 0], spans[:, 1])

    def num_opening(self, ids: np.ndarray) -> int:
        """How many ids in front (BOS) belong to no text and must survive a cut from the left."""
        if self._opening and ids[: len(self._opening)].tolist() == self._opening:
            return len(self._opening)
        return int(len(ids) > 0 and ids[0] == self._bos)

    def decode(self, ids: np.ndarray) -> str:
        text = self._tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _plain(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # lengths are ours to judge
        )
        return encoded["input_ids"]

    def _opened(self, ids: list[int]) -> list[int]:
        width = len(self._opening)
        if width == 0:
            return ids
        start = 0
        while ids[start : start + width] == self._opening:
            start += width
        return self._opening + ids[start:]


def parse_ids(value: Any, num_ids: int) -> np.ndarray:
    """A column's value as token ids int32 [P]: a list of integers, or the JSON text of one.

    Raises ValueError when one is not an id of the tokenizer, which has num_ids of them.
    """
    try:
        ids = np.array(json.loads(value) if isinstance(value, str) else value)
    except ValueError as error:  # not JSON, or lists of different lengths
        raise ValueError(f"prompt.input_ids must be a list of integers: {error}") from error
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError("prompt.input_ids must be a list of integers, none of them null")
    outside = np.flatnonzero((ids < 0) | (ids >= num_ids))
    if outside.size:
        position = int(outside[0])
        raise ValueError(f"token id {ids[position]} at position {position} is not within 0..{num_ids - 1}")
    return ids.astype(np.int32)
