"""Rows -> requests: the text of a row, its token ids, and what happens to a row that has none.

Knows: which columns make the prompt, its limit, and that a bad row becomes a refusal and never an
exception. Refuses to know: how rows are read, which are left to do, how sampling works.

Shapes: P = tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.config import OverLong, PromptConfig, TruncateAt
from pipeline.prompts.compose import PromptText, column_text
from pipeline.prompts.tokenizer import TextEncoder, parse_ids
from pipeline.prompts.truncate import cut_ids, cut_tokens, line_pieces, longest_fit, token_pieces
from pipeline.request import FinishReason, Refusal, Request, RowError, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.input.rows import Row

PROMPT_INVALID = "prompt_invalid"
PROMPT_TOO_LONG = "prompt_too_long"

# Texts tokenised in one call: enough for the tokenizer's own threads, few enough for a quick first
# token; and not more characters than some 100 MB of its intermediate results.
_CHUNK_ROWS = 64
_CHUNK_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Prompt:
    """A row's prompt as sent: text, ids int32 [P], and how many tokens were cut to make it fit."""

    text: str
    ids: np.ndarray
    truncated_tokens: int = 0


@dataclass(frozen=True)
class PromptRow:
    """What a request carries through the engine: the row it came from and the tokens cut."""

    row: Row
    truncated_tokens: int


@dataclass(frozen=True)
class _Draft:
    """A row on its way: its prompt as text, or as ids, or the refusal it already has."""

    row: Row
    content: str | np.ndarray | Refusal

    @property
    def num_characters(self) -> int:
        return 0 if isinstance(self.content, Refusal) else len(self.content)


def longest_prompt(config: PromptConfig, max_model_len: int) -> int:
    """The limit in tokens: prompt.max_tokens, or all that leaves room for one token of completion."""
    room = max_model_len - 1
    if config.max_tokens is None:
        return room
    if config.max_tokens > room:
        raise ValueError(
            f"prompt.max_tokens={config.max_tokens} leaves no room for a completion within "
            f"model.max_model_len={max_model_len}: use {room} or less, or null"
        )
    return config.max_tokens


class PromptBuilder:
    """Makes requests of rows. Everything that is wrong for all rows is said by the constructor or check().

    max_prompt_tokens: the limit, see longest_prompt. available: the input's columns; None when the
    input is empty and has none. model_path: for errors, if the tokenizer was not loaded from it.
    Raises ValueError naming the key, the value and the remedy.
    """

    def __init__(
        self,
        config: PromptConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        available: Sequence[str] | None = None,
        model_path: str | None = None,
    ) -> None:
        self._config = config
        self._limit = max_prompt_tokens
        self._left = config.too_long is OverLong.truncate_left
        self._text = PromptText(config, tokenizer, available, model_path or tokenizer.name_or_path)
        self.columns = self._text.columns
        by_line = config.truncate_column is not None and config.truncate_at is TruncateAt.line
        needs_spans = config.too_long not in (OverLong.error, OverLong.skip) and not by_line
        if needs_spans and config.input_ids is None and not tokenizer.is_fast:
            raise ValueError(
                f"prompt.too_long={config.too_long.value} cuts between characters, which needs a fast "
                f"tokenizer, and {type(tokenizer).__name__} is none: use prompt.too_long=error or skip, or "
                "prompt.truncate_column with prompt.truncate_at=line"
            )
        self._encoder = TextEncoder(tokenizer)

    def check(self, row: Row | None) -> None:
        """Says before the model is loaded that the chat template cannot take the system message.

        row: the first one, None for an empty input. Raises ValueError with row and template error.
        """
        if row is not None:
            self._text.check(row.values(self.columns), _place(row))

    def build(self, row: Row) -> Prompt | Refusal:
        """One row's prompt, or why it has none."""
        return self.build_all([row])[0]

    def build_all(self, rows: Sequence[Row]) -> list[Prompt | Refusal]:
        """The same for several rows, tokenised together."""
        return list(self._finish([self._draft(row) for row in rows]))

    def requests(
        self,
        rows: Iterable[Row],
        params: SamplingParams,
        samples: Callable[[Row], tuple[int, ...]] | None = None,
        refuse: Callable[[Row], Refusal | None] | None = None,
        row_params: Callable[[Row], SamplingParams] | None = None,
    ) -> Iterator[Request]:
        """A request for each row, in order. Reads at most 64 rows ahead; meant to run inside a ReadAhead.

        samples: which samples a row still lacks; None asks for all params.n.
        refuse: a verdict asked before any work on the row; None keeps every row.
        row_params: the parameters of a row that is not refused; None gives params to all.
        """
        every = tuple(range(params.n))
        for drafts in _chunks(self._draft(row, refuse) for row in rows):
            for draft, outcome in zip(drafts, self._finish(drafts), strict=True):
                row = draft.row
                refusal = outcome if isinstance(outcome, Refusal) else None
                prompt = outcome if isinstance(outcome, Prompt) else None
                yield Request(
                    key=row.key,
                    prompt_ids=prompt.ids if prompt else np.empty(0, np.int32),
                    params=params if refusal or row_params is None else row_params(row),
                    samples=every if samples is None else samples(row),
                    prompt=prompt.text if prompt else None,
                    payload=PromptRow(row, prompt.truncated_tokens if prompt else 0),
                    refusal=refusal,
                )

    def _draft(self, row: Row, refuse: Callable[[Row], Refusal | None] | None = None) -> _Draft:
        verdict = None if refuse is None else refuse(row)
        if verdict is not None:
            return _Draft(row, verdict)
        values = row.values(self.columns)
        try:
            if self._config.input_ids is not None:
                return _Draft(row, parse_ids(values[self._config.input_ids], self._encoder.num_ids))
            return _Draft(row, self._text.compose(values))
        except ValueError as error:
            return _Draft(row, _invalid(row, error))

    def _finish(self, drafts: Sequence[_Draft]) -> Iterator[Prompt | Refusal]:
        encoded = iter(self._encoder.encode([d.content for d in drafts if isinstance(d.content, str)]))
        for draft in drafts:
            if isinstance(draft.content, Refusal):
                yield draft.content
                continue
            ids = next(encoded) if isinstance(draft.content, str) else draft.content
            try:
                yield self._fit(draft.row, draft.content, ids)
            except ValueError as error:
                yield _invalid(draft.row, error)

    def _fit(self, row: Row, content: str | np.ndarray, ids: np.ndarray) -> Prompt | Refusal:
        if len(ids) == 0:
            raise ValueError("the prompt is empty")
        if len(ids) <= self._limit:
            return Prompt(content if isinstance(content, str) else self._encoder.decode(content), ids)
        if self._config.too_long is OverLong.skip:
            return Refusal(FinishReason.SKIPPED)
        prompt = None
        if self._config.truncate_column is not None:
            assert isinstance(content, str)
            prompt = self._shorten_column(row, self._config.truncate_column, content, len(ids))
        elif self._config.too_long is not OverLong.error:
            prompt = self._shorten(content, ids)
        if prompt is not None:
            return prompt
        cut = "" if self._config.too_long is OverLong.error else ", and cutting it leaves nothing that fits"
        message = f"the prompt has {len(ids)} tokens, the limit is {self._limit}{cut} ({_place(row)})"
        return Refusal(FinishReason.ERROR, RowError(PROMPT_TOO_LONG, message))

    def _shorten(self, content: str | np.ndarray, ids: np.ndarray) -> Prompt | None:
        """Cuts the ids themselves; None when nothing but BOS would stay."""
        front = self._encoder.num_opening(ids)
        if isinstance(content, str):
            tokens = self._encoder.encode_with_spans(content)
            kept, text = cut_tokens(tokens, content, self._limit, front, self._left)
        else:
            kept = cut_ids(ids, self._limit, front, self._left, self._encoder.decode)
            text = self._encoder.decode(kept)
        return Prompt(text, kept, len(ids) - len(kept)) if len(kept) > front else None

    def _shorten_column(self, row: Row, column: str, text: str, num_tokens: int) -> Prompt | None:
        """Cuts one column's text; None when the rest is too long without it. Raises ValueError."""
        values = row.values(self.columns)
        if values[column] is None:
            return None
        document = column_text(values, column, "prompt.truncate_column")
        excess = num_tokens - self._limit
        if self._config.truncate_at is TruncateAt.line:
            pieces = line_pieces(document, self._left)
            guess = pieces.count_within(len(document) - excess * len(text) // num_tokens)
        else:
            pieces = token_pieces(document, self._encoder.encode_with_spans(document), self._left)
            guess = len(pieces) - excess
        tried: dict[int, Prompt] = {}

        def length(count: int) -> int:
            shorter = self._text.compose({**values, column: pieces.keep(count)})
            ids = self._encoder.encode([shorter])[0]
            tried[count] = Prompt(shorter, ids, num_tokens - len(ids))
            return len(ids)

        count = longest_fit(len(pieces), guess, length, self._limit)
        if count is None or len(tried[count].ids) <= self._encoder.num_opening(tried[count].ids):
            return None
        return tried[count]


def _chunks(drafts: Iterable[_Draft]) -> Iterator[list[_Draft]]:
    chunk: list[_Draft] = []
    num_characters = 0
    for draft in drafts:
        chunk.append(draft)
        num_characters += draft.num_characters
        if len(chunk) == _CHUNK_ROWS or num_characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, num_characters = [], 0
    if chunk:
        yield chunk


def _invalid(row: Row, error: ValueError) -> Refusal:
    return Refusal(FinishReason.ERROR, RowError(PROMPT_INVALID, f"{error} ({_place(row)})"))


def _place(row: Row) -> str:
    return f"file {row.key.file}, row {row.key.row}"
