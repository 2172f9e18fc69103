"""What to say when a model, its tokenizer or its weights cannot be had: one line with the remedy.

Knows the errors of transformers and of the hub's client, which wrap each other and run over many
lines; refuses to know what was being loaded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import huggingface_hub.constants
from huggingface_hub import errors as hub

_CUSTOM_CODE = "trust_remote_code"
# Of requests and httpx, of which the hub's client has used both.
_NO_NETWORK = {"ConnectError", "ConnectTimeout", "ConnectionError", "ReadTimeout"}


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def explain_unreadable(path: str, name: str, error: BaseException, key: str = "model.path") -> str:
    """Why `path`, a folder or a name on the hub, does not give the file `name`."""
    folder = Path(os.path.expanduser(path))
    if _CUSTOM_CODE in str(error):
        return (
            "it brings Python code of its own, which transformers runs only when allowed to: read that "
            "code, then set model.trust_remote_code=true"
        )
    if folder.is_dir():
        missing = "" if (folder / name).exists() else f"the folder has no {name}. "
        return missing + one_line(error)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        return "no such folder"
    return f"there is no such folder here, and as a name on the hub: {_on_the_hub(key, error)}"


@contextmanager
def quiet_retries() -> Iterator[None]:
    """The hub's client warns of every attempt; what came of them all is said once, by the error."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def require_packages(packages: dict[str, str], what: str, extra: str) -> None:
    """Raises ValueError naming the first module that is not installed, and the pip command.

    packages: module to import -> what pip calls it. extra: of ours (`tokenmill[gguf]`), or a package.
    """
    absent = [pip for module, pip in packages.items() if find_spec(module) is None]
    if absent:
        raise ValueError(f"{what} needs {' and '.join(absent)}: pip install '{extra}'")


def _on_the_hub(key: str, error: BaseException) -> str:
    for cause in _chain(error):
        # Its subclass for gated repositories comes first.
        if isinstance(cause, hub.GatedRepoError):
            return "its authors ask for consent first; give it on the model's page, then `hf auth login`"
        if isinstance(cause, hub.RepositoryNotFoundError):
            return "there is none, or it is private (then `hf auth login` first)"
        if isinstance(cause, hub.RevisionNotFoundError):
            return f"it has no such revision; check {key.rpartition('.')[0]}.revision"
        unreachable = isinstance(cause, hub.OfflineModeIsEnabled | hub.LocalEntryNotFoundError)
        if unreachable or type(cause).__name__ in _NO_NETWORK or "couldn't connect" in str(cause):
            offline = huggingface_hub.constants.HF_HUB_OFFLINE
            why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
            return (
                f"it is not in the cache, and {why}. Run `tokenmill prefetch` with the same keys where "
                f"there is a network, or set {key} to a folder"
            )
    return one_line(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__
