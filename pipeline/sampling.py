"""The sampling values that apply to a job and to a row, and where each came from.

A value set in the job's configuration wins; then, under `sampling.defaults: model`, the model's
own generation configuration; then the neutral value. A row's own values (`sampling.column`) win
over all. Knows settings; refuses to know tensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config import JobConfig, SamplingConfig, SamplingDefaults, mapping
from pipeline.input.rows import Row
from pipeline.report.summary import ResolvedValue
from pipeline.request import SamplingParams

# What leaves the model's distribution as it is.
_NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": None,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_PLAIN = ("max_tokens", "min_tokens", "stop", "ignore_eos", "presence_penalty", "frequency_penalty", "n")
# Values of a generation configuration that change what comes out and that the engine lacks, with
# those that mean nothing. https://huggingface.co/docs/transformers/main_classes/text_generation
_LACKING: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0.0),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_h": (None,),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "exponential_decay_length_penalty": (None,),
    "sequence_bias": (None, {}),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "begin_suppress_tokens": (None, []),
    "guidance_scale": (None, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "stop_strings": (None, []),
    "watermarking_config": (None,),
    "dola_layers": (None,),
    "token_healing": (None, False),
}
_MODEL = "the model's generation_config"
_JOB = "the job's configuration"
# Keys of a row's own values; what is recorded, and how many samples, is the job's matter.
_OF_A_ROW = frozenset(f.name for f in dataclasses.fields(SamplingParams)) - {
    "n",
    "logprobs",
    "top_logprobs",
    "bad_words_ids",
} | {"bad_words"}  # fmt: skip
# Far past every model's range, and still an int32 when prompts are added to it.
_LARGEST_COUNT = 2**30
_COUNTS = ("max_tokens", "min_tokens", "top_k")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def resolve_sampling(
    config: JobConfig, generation_config: Any, tokenizer: Any, eos_ids: Sequence[int]
) -> tuple[SamplingParams, list[ResolvedValue]]:
    """One SamplingParams for all rows, and each value with its origin, as `sampling.<name>`.

    generation_config: transformers' (None if the model has none). Raises ValueError for values out
    of range, naming the key, and for what the model asks for and the engine lacks.
    """
    s = config.sampling
    own = generation_config if s.defaults is SamplingDefaults.model else None
    _refuse_lacking(own)
    values = {name: _filter_value(name, s, own) for name in _NEUTRAL}
    stop, special = _split_stops(s.stop, tokenizer)
    _check_ids("stop_token_ids", s.stop_token_ids, len(tokenizer))
    words = [*_word_ids(s.bad_words, tokenizer), *map(tuple, getattr(own, "bad_words_ids", None) or ())]
    suppressed = [(token, float("-inf")) for token in getattr(own, "suppress_tokens", None) or ()]
    bias = _token_biases(mapping("sampling.logit_bias", s.logit_bias), len(tokenizer))
    params = SamplingParams(
        **{name: value for name, (value, _) in values.items()},
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        stop=stop,
        stop_token_ids=(*s.stop_token_ids, *special),
        ignore_eos=s.ignore_eos,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=(*bias, *suppressed),
        bad_words_ids=tuple(words),
        n=s.n,
        logprobs=config.output.logprobs,
        top_logprobs=config.output.topk,
    )
    resolved = [ResolvedValue(f"sampling.{name}", *values[name]) for name in _NEUTRAL]
    resolved += [ResolvedValue(f"sampling.{name}", getattr(s, name), _JOB) for name in _PLAIN]
    ends = sorted({*params.stop_token_ids, *(() if s.ignore_eos else eos_ids)})
    origin = _JOB if s.ignore_eos else f"{_MODEL}, its tokenizer and {_JOB}"
    resolved.append(ResolvedValue("sampling.stop_token_ids", ends, origin))
    if params.bad_words_ids:
        resolved.append(ResolvedValue("sampling.bad_words", [list(w) for w in words], f"{_JOB} and {_MODEL}"))
    if params.logit_bias:
        shown = {str(token): str(value) for token, value in params.logit_bias}
        resolved.append(ResolvedValue("sampling.logit_bias", shown, f"{_JOB} and {_MODEL}"))
    return params, resolved


class RowSampling:
    """The sampling parameters of single rows: the job's, changed by what the row's column says.

    The column holds structs or JSON objects, or nulls; a null inside one is a key that is not there.
    A row's values replace the job's of the same key. Raises ValueError for a column that the input lacks.
    """

    def __init__(self, column: str, params: SamplingParams, tokenizer: Any, available: Sequence[str]) -> None:
        if column not in available:
            raise ValueError(
                f"sampling.column={column} is not in the input: it has {', '.join(available) or 'no columns'}"
            )
        self.column = column
        self._params = params
        self._tokenizer = tokenizer
        # Rows of one kind share one object; bounded, since a column may hold a seed of its own per row.
        self._known: dict[str, SamplingParams] = {}

    def __call__(self, row: Row) -> SamplingParams:
        """Raises ValueError naming the column and the value: the row becomes an error, not the job."""
        value = row.value(self.column)
        if isinstance(value, str):
            value = self._parsed(value)
        if value is None:
            return self._params
        if not isinstance(value, Mapping):
            raise ValueError(
                f"sampling.column={self.column} holds {value!r}, which is no object of keys and values"
            )
        chosen = {key: item for key, item in value.items() if item is not None}
        name = json.dumps(chosen, sort_keys=True, default=str)
        if name not in self._known:
            if len(self._known) >= 4096:
                self._known.clear()
            self._known[name] = self._changed(chosen)
        return self._known[name]

    def _parsed(self, text: str) -> Any:
        try:
            return json.loads(text) if text.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(
                f"sampling.column={self.column} holds {text!r}, which is no JSON: {error}"
            ) from error

    def _changed(self, chosen: dict[str, Any]) -> SamplingParams:
        unknown = sorted(set(chosen) - _OF_A_ROW)
        if unknown:
            allowed = ", ".join(sorted(_OF_A_ROW))
            raise ValueError(
                f"sampling.column={self.column} sets {', '.join(unknown)}; a row may set {allowed}"
            )
        try:
            return dataclasses.replace(self._params, **self._fields(chosen))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"sampling.column={self.column} holds values that do not work: {error}"
            ) from error

    def _fields(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """The row's values as fields of SamplingParams. Raises TypeError or ValueError."""
        num_ids = len(self._tokenizer)
        fields = {name: _typed(name, value) for name, value in chosen.items()}
        special: tuple[int, ...] = ()
        if "stop" in chosen:
            fields["stop"], special = _split_stops(_texts("stop", chosen["stop"]), self._tokenizer)
        if "stop_token_ids" in chosen:
            fields["stop_token_ids"] = tuple(
                _count("stop_token_ids", one) for one in chosen["stop_token_ids"]
            )
            _check_ids("stop_token_ids", fields["stop_token_ids"], num_ids)
        if special:
            fields["stop_token_ids"] = (*fields.get("stop_token_ids", self._params.stop_token_ids), *special)
        if "logit_bias" in chosen:
            pairs = chosen["logit_bias"]
            fields["logit_bias"] = _token_biases(
                pairs if isinstance(pairs, Mapping) else dict(pairs), num_ids
            )
        if "bad_words" in chosen:
            fields["bad_words_ids"] = tuple(
                _word_ids(_texts("bad_words", fields.pop("bad_words")), self._tokenizer)
            )
        return fields


def _typed(name: str, value: Any) -> Any:
    """A row's value, of the type that its field has: columns are not checked when a job begins."""
    if name in _COUNTS:
        return _count(name, value)
    if name in _NUMBERS and (
        isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
    ):
        raise ValueError(f"sampling.{name}={value!r} is no number")
    if name == "ignore_eos" and not isinstance(value, bool):
        raise ValueError(f"sampling.{name}={value!r} is neither true nor false")
    return value


def _count(name: str, value: Any) -> int:
    """A whole number. As a float, too: so integers come out of a column in which some rows have none."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not abs(value) < _LARGEST_COUNT or value != int(value):
        raise ValueError(f"sampling.{name}={value!r} is no whole number below {_LARGEST_COUNT}")
    return int(value)


def _texts(name: str, value: Any) -> list[str]:
    """One text, or a list of them."""
    texts = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"sampling.{name}={value!r} is no list of texts")
    return texts


def _check_ids(name: str, ids: Sequence[int], num_ids: int) -> None:
    for one in ids:
        if not 0 <= one < num_ids:
            raise ValueError(
                f"sampling.{name}={list(ids)}: {one} is no token of this model: use ids from 0 to "
                f"{num_ids - 1}"
            )


def _filter_value(name: str, config: SamplingConfig, generation_config: Any) -> tuple[Any, str]:
    chosen = getattr(config, name)
    if chosen is not None:
        return chosen, _JOB
    if generation_config is None:
        return _NEUTRAL[name], "the neutral value"
    sampled = getattr(generation_config, "do_sample", None)
    if name == "temperature" and not sampled:
        # transformers generates greedily unless the model says otherwise.
        return 0.0, f"{_MODEL}: do_sample is {str(bool(sampled)).lower()}"
    value = getattr(generation_config, name, None)
    # 0 switches top-k off in some published configurations.
    if value is None or (name == "top_k" and value == 0):
        return _NEUTRAL[name], "the neutral value"
    return value, _MODEL


def _refuse_lacking(generation_config: Any) -> None:
    """What a model asks for must not be dropped without a word."""
    for name, nothing in _LACKING.items():
        value = getattr(generation_config, name, None)
        if value not in nothing:
            raise ValueError(
                f"{_MODEL} sets {name}={value!r}, which the engine does not have: set sampling.defaults=none "
                "and the sampling values you want"
            )


def _split_stops(stop: Sequence[str], tokenizer: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop strings that are one special token become stop ids: such tokens never show in the text."""
    special = {
        token: tokenizer.convert_tokens_to_ids(token)
        for token in stop
        if token in getattr(tokenizer, "all_special_tokens", ())
    }
    return tuple(s for s in stop if s not in special), tuple(special.values())


def _token_biases(biases: Mapping[Any, Any], num_ids: int) -> tuple[tuple[int, float], ...]:
    """A null is a token without a bias: columns of structs have one for each key that another row has."""
    try:
        pairs = sorted((int(token), float(bias)) for token, bias in biases.items() if bias is not None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"sampling.logit_bias={dict(biases)} is no mapping of token ids to numbers: {error}"
        ) from error
    _check_ids("logit_bias", [token for token, _ in pairs], num_ids)
    if any(math.isnan(bias) or bias == math.inf for _, bias in pairs):
        raise ValueError(
            f"sampling.logit_bias={dict(biases)} must hold finite numbers, or -inf for tokens that must not "
            "occur"
        )
    return tuple(pairs)


def _word_ids(words: Sequence[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """Every word as it is and with a space before it, each distinct spelling once."""
    spellings = [f"{space}{word.lstrip()}" for word in words for space in ("", " ")]
    if any(not spelling.strip() for spelling in spellings):
        raise ValueError(f"sampling.bad_words={list(words)} has an empty word: remove it")
    ids = [tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings]
    return list(dict.fromkeys(ids))
