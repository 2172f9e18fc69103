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

ASSETS = Path(__file__).resolve().parent / "assets"


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


def asset_path(name: str) -> str:
    """The file or folder `name` that comes with the package, wherever that is installed."""
    path = ASSETS / name
    if not path.exists():
        raise ValueError(f"${{assets:{name}}} is not among the package's files in {ASSETS}")
    return str(path)


def worker_name() -> str:
    """A name that no other process writing to the same output directory has."""
    array_job, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array_job and task:
        return f"{array_job}_{task}"
    return f"{socket.gethostname()}-{os.getpid()}"
