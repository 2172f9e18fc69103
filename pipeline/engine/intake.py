"""What a model cannot take, said before anything is spent on it.

Knows requests and the limits of a model; refuses to know sequences and memory.
"""

from __future__ import annotations

from pipeline.models.load import LoadedModel
from pipeline.request import FinishReason, Refusal, Request, RowError


def refusal_of(request: Request, loaded: LoadedModel) -> Refusal | None:
    """Why the model cannot take this prompt; None if it can. The row's own refusal comes first."""
    if request.refusal is not None:
        return request.refusal
    ids, limit, last = request.prompt_ids, loaded.max_model_len, loaded.architecture.vocab_size - 1
    if not len(ids):
        return _error("prompt_invalid", "the prompt is empty")
    if len(ids) >= limit:
        return _error(
            "prompt_too_long",
            f"the prompt has {len(ids)} tokens; model.max_model_len={limit} allows {limit - 1} at most",
        )
    foreign = next((int(i) for i in (ids.min(), ids.max()) if not 0 <= i <= last), None)
    if foreign is not None:
        return _error("prompt_invalid", f"the prompt has the id {foreign}; the vocabulary is 0 to {last}")
    return None


def _error(code: str, message: str) -> Refusal:
    return Refusal(FinishReason.ERROR, RowError(code, message))
