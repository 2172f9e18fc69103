"""What the sampler must know about a step's rows, as arrays.

Built on the host from the sequence table; what no row uses is None and costs nothing. Knows numpy;
refuses to know torch.

Shapes: N = sampled rows of the step, H = those whose logits depend on their history.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.engine.philox import uniforms
from pipeline.engine.scheduler import Schedule
from pipeline.engine.sequence import NO_TOKEN, SequenceTable


@dataclass(frozen=True)
class HistoryInputs:
    """The tokens of rows with penalties or bad words, but for each row's last.

    The last one may be on the device only; the runner has it, as the row's input. rows: int64 [H],
    which of the sampled rows. tokens: int64 [H, L], padded at the end. num_tokens, num_prompt:
    int64 [H], how many tokens are known here, and how many tokens the prompt has. repetition,
    presence, frequency: float32 [H].
    """

    rows: np.ndarray
    tokens: np.ndarray
    num_tokens: np.ndarray
    num_prompt: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray


@dataclass(frozen=True)
class BadWords:
    """Sequences that may not be completed. history_rows: int64 [M], the row among the H (0 for words
    of one token). rows: int64 [M] among the N. ids: int64 [M, W], padded at the front with NO_TOKEN.
    """

    history_rows: np.ndarray
    rows: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class LogitBias:
    """values float32 [M] to add to the logits at (rows, ids) int64 [M]."""

    rows: np.ndarray
    ids: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Draws:
    """keys: uint32 [N, 2]. numbers: [N], which of its sequence's draws each row takes.

    The numbers themselves are made when somebody asks: a GPU makes those of its decode steps itself.
    """

    keys: np.ndarray
    numbers: np.ndarray

    @cached_property
    def uniform(self) -> np.ndarray:
        """float64 [N] in [0, 1)."""
        return uniforms(self.keys, self.numbers)


@dataclass(frozen=True)
class SamplingInputs:
    """Per sampled row, all [N]. slots: int64, where the sampled id is kept for the next step.

    draws: the rows' random numbers. forbidden: int64 [M, 2], pairs
    (row, id) that may not be sampled yet because of min_tokens.
    """

    slots: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    draws: Draws
    forbidden: np.ndarray
    history: HistoryInputs | None = None
    bias: LogitBias | None = None
    bad_words: BadWords | None = None

    @property
    def uniform(self) -> np.ndarray:
        """float64 [N] in [0, 1), each row's draw."""
        return self.draws.uniform


def build_sampling_inputs(schedule: Schedule, table: SequenceTable) -> SamplingInputs:
    """Gather the sampled rows' parameters; their draws are a function of key and position alone."""
    rows = np.flatnonzero(schedule.sampled)
    slots = schedule.slots[rows]
    length = schedule.starts[rows] + schedule.query_lens[rows]
    too_early = np.flatnonzero(length < table.min_length[slots])
    stop_ids = table.stop_ids[slots[too_early]]
    early_row, column = np.nonzero(stop_ids != NO_TOKEN)
    history = _history(slots, length, table) if table.has_history[slots].any() else None
    edited = table.has_edits[slots].any()
    return SamplingInputs(
        slots=slots.astype(np.int64),
        temperature=table.temperature[slots],
        top_k=table.top_k[slots],
        top_p=table.top_p[slots],
        min_p=table.min_p[slots],
        draws=Draws(table.philox_keys[slots], length - table.num_prompt[slots]),
        forbidden=np.stack([too_early[early_row], stop_ids[early_row, column]], axis=1).astype(np.int64),
        history=history,
        bias=_bias(slots, table) if edited else None,
        bad_words=_bad_words(slots, table, history) if edited else None,
    )


def _history(slots: np.ndarray, length: np.ndarray, table: SequenceTable) -> HistoryInputs:
    rows = np.flatnonzero(table.has_history[slots])
    slots, known = slots[rows], (length[rows] - 1).astype(np.int64)
    return HistoryInputs(
        rows=rows.astype(np.int64),
        tokens=table.tokens[slots, : int(known.max())].astype(np.int64),
        num_tokens=known,
        num_prompt=table.num_prompt[slots].astype(np.int64),
        repetition=table.repetition_penalty[slots],
        presence=table.presence_penalty[slots],
        frequency=table.frequency_penalty[slots],
    )


def _bias(slots: np.ndarray, table: SequenceTable) -> LogitBias | None:
    entries = [
        (row, token, value)
        for row in np.flatnonzero(table.has_edits[slots]).tolist()
        for token, value in table.params_of(slots[row]).logit_bias
    ]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    return LogitBias(np.array(rows, np.int64), np.array(ids, np.int64), np.array(values, np.float32))


def _bad_words(slots: np.ndarray, table: SequenceTable, history: HistoryInputs | None) -> BadWords | None:
    entries = [
        (row, word)
        for row in np.flatnonzero(table.has_edits[slots]).tolist()
        for word in table.params_of(slots[row]).bad_words_ids
    ]
    if not entries:
        return None
    rows = np.array([row for row, _ in entries], np.int64)
    ids = np.full((len(entries), max(len(word) for _, word in entries)), NO_TOKEN, np.int64)
    for at, (_, word) in enumerate(entries):
        ids[at, ids.shape[1] - len(word) :] = word
    history_rows = np.zeros_like(rows) if history is None else np.searchsorted(history.rows, rows)
    return BadWords(np.minimum(history_rows, 0 if history is None else len(history.rows) - 1), rows, ids)
