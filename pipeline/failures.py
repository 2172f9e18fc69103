"""Turns what went wrong into what the user reads: one message with key, value and remedy.

Knows: which errors are the user's to mend (ValueError, OSError, those of hydra and omegaconf) and how
hydra words them. A sibling of the entry points, which end through `explain`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
import traceback
import typing
from collections.abc import Iterator
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline import config
from pipeline.masking import mask


class PastHydra(BaseException):
    """Carries its cause out through hydra, which would print, reword or only warn of an Exception."""


USER_ERRORS = (ValueError, OSError, HydraException, OmegaConfBaseException)


def explain(error: BaseException, tracebacks: bool | None = None) -> int:
    """Prints `error` on standard error and returns the exit code.

    tracebacks: print the whole traceback too; None asks the environment.
    """
    if isinstance(error, KeyboardInterrupt):
        print("tokenmill: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    if tracebacks is None:
        tracebacks = wants_tracebacks()
    expected = isinstance(error, USER_ERRORS)
    if tracebacks or not expected:
        print(mask("".join(traceback.format_exception(error))).rstrip(), file=sys.stderr)
    if expected:
        print(f"tokenmill: {message(error)}", file=sys.stderr)
    else:
        print(f"tokenmill: unexpected {type(error).__name__}; finished rows are kept", file=sys.stderr)
    return 1


def wants_tracebacks() -> bool:
    return "1" in (os.environ.get("TOKENMILL_TRACEBACK"), os.environ.get("HYDRA_FULL_ERROR"))


def message(error: BaseException) -> str:
    """What to say of an error that the user can mend: hydra's and omegaconf's in one line of ours."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return mask(f"{error.filename}: {error.strerror}")
    if not isinstance(error, HydraException | OmegaConfBaseException):
        return mask(str(error) or type(error).__name__)
    cause = next((e for e in _chain(error) if isinstance(e, OmegaConfBaseException)), None)
    if cause is not None:
        return mask(_wrong_key_or_value(error, cause))
    text = str(error).split("Config search path:")[0]
    return mask(" ".join(text.split()) + _choice_hint(text))


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _wrong_key_or_value(error: BaseException, cause: OmegaConfBaseException) -> str:
    key = str(cause.full_key or "")
    if key in ("hydra.run.dir", "hydra.sweep.subdir"):
        key = "output.dir"  # what they are set to
    what = str(cause.msg or cause).split("\n")[0]
    override = re.search(r"override '?\+*([^'\n=]+)", str(error).split("\n")[0])
    if "not in '" in what:
        owner = getattr(cause.object_type, "__name__", "")
        return unknown_key(override[1] if override else key, owner)
    return f"{key}: {what}; --cfg job prints every key with its value"


def unknown_key(key: str, owner: str) -> str:
    """What to say of a key that the class named `owner` does not have."""
    near = difflib.get_close_matches(key, known_keys(), n=3, cutoff=0.75)
    if key in near:
        group = key.split(".")[0]
        kind = "native" if group == "engine" else owner.removesuffix("Source").lower()
        remedy = f"{group}={kind} has no use for it, another kind of {group} does"
    elif near:
        remedy = f"did you mean {' or '.join(near)}?"
    else:
        remedy = "--cfg job prints every key"
    return f"{key} is not a key of {owner}: {remedy}"


def check_keys(job: DictConfig) -> None:
    """Raises ValueError for a key that is not set, or one that `+key=value` put where none is known."""
    _refuse_unknown(job, "")
    missing = sorted(OmegaConf.missing_keys(job))
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not set: give it on the command "
            f"line, {' '.join(f'{key}=...' for key in missing)}, or in a recipe"
        )


def _refuse_unknown(node: DictConfig, prefix: str) -> None:
    owner = OmegaConf.get_type(node)
    if not dataclasses.is_dataclass(owner):
        return
    fields = {field.name for field in dataclasses.fields(owner)}
    for name in map(str, node):
        if name not in fields:
            raise ValueError(unknown_key(f"{prefix}{name}", owner.__name__))
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not (child._is_missing() or child._is_none()):
            _refuse_unknown(child, f"{prefix}{name}.")


def known_keys() -> list[str]:
    """Every key of a job as it is typed, those of all kinds of source and engine together."""
    keys = list(_keys_of(config.JobConfig, ""))
    for kind in (config.ParquetSource, config.JsonlSource, config.HFSource):
        keys += _keys_of(kind, "source.")
    keys += _keys_of(config.TransformersEngineConfig, "engine.")
    return list(dict.fromkeys(keys))


def _keys_of(cls: Any, prefix: str) -> Iterator[str]:
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(types[field.name]):
            yield from _keys_of(types[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _choice_hint(text: str) -> str:
    group = re.search(r"Could not find '(source|model)/", text)
    return f"; a path is given as {group[1]}.path=..." if group else ""
