"""Which commit of a repository on the hub a revision is at this moment.

A branch may move between two files that are read of it, and between two starts of a job; a commit
may not. Knows how the hub's cache names its folders; refuses to know models.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from transformers.utils import cached_file

from pipeline.config import ModelConfig
from pipeline.models.gguf import require_gguf
from pipeline.models.load_errors import explain_unreadable, quiet_retries

_IN_THE_CACHE = re.compile(r"/snapshots/([0-9a-f]{40})/")


def pin_revision(config: ModelConfig) -> ModelConfig:
    """The same with a commit as its revision; a folder is left as it is.

    Raises ValueError if there is neither a folder nor a repository of that name.
    """
    # A large file is not fetched only to find that nothing can open it.
    require_gguf(config)
    name = config.gguf_file or "config.json"
    if Path(config.path).expanduser().is_dir():
        return config
    try:
        with quiet_retries():
            file = cached_file(config.path, name, revision=config.revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.path={config.path} cannot be read as a model: "
            f"{explain_unreadable(config.path, name, error)}"
        ) from error
    found = _IN_THE_CACHE.search(Path(file or "").as_posix())
    return replace(config, revision=found[1]) if found else config
