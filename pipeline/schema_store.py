"""Tells Hydra the types of every key, and a few words for configuration files.

Knows: hydra's ConfigStore and the dataclasses of config.py. Imported by the entry points only, so
that the library can be used without hydra.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from pipeline.bench.sizes import engine_size
from pipeline.config import (
    ArrowSource,
    HFSource,
    JobConfig,
    JsonlSource,
    ParquetSource,
    TransformersEngineConfig,
)
from pipeline.store import is_remote, local_folder

ASSETS = Path(__file__).resolve().parent / "assets"
# How a process that starts workers tells each its name.
WORKER_NAME = "TOKENMILL_WORKER_NAME"


def register() -> None:
    """Registers schemas and resolvers; more than once does no harm.

    The schemas are entries of the root, not of the groups: as members of `source` they would be
    offered as choices by --help and by tab completion.
    """
    store = ConfigStore.instance()
    store.store(name="job_schema", node=JobConfig)
    for name, node in (
        ("parquet_source", ParquetSource),
        ("arrow_source", ArrowSource),
        ("jsonl_source", JsonlSource),
        ("hf_source", HFSource),
        ("transformers_engine", TransformersEngineConfig),
    ):
        store.store(name=name, node=node)
    OmegaConf.register_new_resolver("assets", asset_path, replace=True)
    OmegaConf.register_new_resolver("worker", worker_name, replace=True)
    OmegaConf.register_new_resolver("bench_size", engine_size, replace=True)
    OmegaConf.register_new_resolver("absolute", os.path.abspath, replace=True)
    OmegaConf.register_new_resolver("local_folder", local_folder_name, replace=True)


def asset_path(name: str) -> str:
    """The file or folder `name` that comes with the package, wherever that is installed."""
    path = ASSETS / name
    if not path.exists():
        raise ValueError(f"${{assets:{name}}} is not among the package's files in {ASSETS}")
    return str(path)


def local_folder_name(directory: str, stage_dir: str | None) -> str:
    """Where hydra and our log put what they write of a run: its own directory, if that is local."""
    return str(local_folder(directory, stage_dir)) if is_remote(directory) else directory


def worker_name() -> str:
    """A name that no other process writing to the same output directory has."""
    given = os.environ.get(WORKER_NAME)
    if given:
        return given
    array_job, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array_job and task:
        return f"{array_job}_{task}"
    return f"{socket.gethostname()}-{os.getpid()}"
