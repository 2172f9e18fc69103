"""Brings a model's files to a disk of this machine: the first of its processes copies, the others wait.

Eight tasks on a node that read the same weights over the network at once read them eight times. Knows files
and a lock; refuses to know what is in them. Called when a model is about to be loaded and no sooner: a worker
that finds nothing to do copies nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants
from transformers.utils import cached_file

from pipeline.config import ModelConfig


def staged(config: ModelConfig) -> ModelConfig:
    """The same with model.path a copy in model.stage_dir; as it is if there is no room for one, or if it is a
    name whose files may still have to be fetched. Raises OSError if stage_dir cannot be made."""
    files = _files(config) if config.stage_dir is not None else {}
    if not files or config.stage_dir is None:
        return config
    place = Path(config.stage_dir).expanduser()
    place.mkdir(parents=True, exist_ok=True)
    target = place / f"{Path(config.path).name}-{_digest(files)}"
    with (place / f"{target.name}.lock").open("w") as lock:
        # The system lets go of it with the process: whatever ends the one that copies, another goes on.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir() and not _copy(files, target):
            return config
    return replace(config, path=str(target), revision=None)


def _files(config: ModelConfig) -> dict[str, Path]:
    """Names below the model's folder with where they are: the GGUF file alone, if it is one."""
    folder = Path(config.path).expanduser()
    if not folder.is_dir():
        if not constants.HF_HUB_OFFLINE:
            # The hub's client may still have to fetch what there is to copy.
            return {}
        found = cached_file(config.path, config.gguf_file or "config.json", revision=config.revision)
        assert found is not None, "the configuration was read from there before"
        folder = Path(found).parents[(config.gguf_file or "").count("/")]
    if config.gguf_file:
        return {config.gguf_file: folder / config.gguf_file}
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def _digest(files: dict[str, Path]) -> str:
    """Of names, sizes and dates: other weights under the same path get a copy of their own."""
    digest = hashlib.sha256()
    for name, path in files.items():
        found = path.stat()
        digest.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def _copy(files: dict[str, Path], target: Path) -> bool:
    """All or nothing: target appears when everything is on the disk. False if there is no room."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    need, free = sum(path.stat().st_size for path in files.values()), shutil.disk_usage(target.parent).free
    if need > free:
        print(
            f"tokenmill: model.stage_dir={target.parent} has {free:,} bytes free and the model's files are "
            f"{need:,}: they are read from where they are",
            file=sys.stderr,
        )
        return False
    for name, path in files.items():
        copy = partial / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        with copy.open("rb") as written:
            os.fsync(written.fileno())
    os.rename(partial, target)
    return True
