"""Fetches all that a job reads from the hub: `python -m pipeline.prefetch [conf=RECIPE] [key=value ...]`.

For a login node: model, tokenizer and data come into the cache that the workers share, and these
then run with the hub offline. Takes the same keys as a run and writes nothing to its output.dir.
"""

from __future__ import annotations

import fnmatch
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from pipeline.config import HFSource, JobConfig, ModelConfig, TransformersEngineConfig
from pipeline.failures import PastHydra, check_keys
from pipeline.run import command_line

# Files of a repository beside its weights: configurations, tokenizers, templates.
_SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_TEMPLATES = "additional_chat_templates/"
# What transformers looks for, in this order, and which files hold the weights then.
_WEIGHTS = {
    "model.safetensors": "model.safetensors",
    "model.safetensors.index.json": "model-*.safetensors",
    "pytorch_model.bin": "pytorch_model.bin",
    "pytorch_model.bin.index.json": "pytorch_model-*.bin",
}


@dataclass(frozen=True)
class Fetched:
    """What of a job lies where. commit: None for what is no repository."""

    what: str
    name: str
    place: str
    commit: str | None = None

    def __str__(self) -> str:
        at = f" at {self.commit}" if self.commit else ""
        return f"{self.what:<10} {self.name}{at}\n{'':<10} {self.place}"


def prefetch(config: JobConfig) -> list[Fetched]:
    """Fetch model, tokenizer and data. ValueError or OSError for what cannot be had, or not be run."""
    model = config.model
    fetched = [fetch_model(model)]
    if model.tokenizer is not None:
        fetched.append(_fetch_tokenizer(model.tokenizer, model.trust_remote_code))
    if model.adapter is not None:
        fetched.append(Fetched("adapter", model.adapter, "a local folder: nothing to fetch"))
    _check(config, fetched)
    return [*fetched, fetch_data(config)]


def fetch_model(model: ModelConfig) -> Fetched:
    if Path(model.path).expanduser().is_dir():
        return Fetched("model", model.path, "a local folder: nothing to fetch")
    files = _listing("model.path", model.path, model.revision)
    wanted = needed_files(files, model.gguf_file, code=model.trust_remote_code)
    return _snapshot("model", model.path, model.revision, wanted)


def _fetch_tokenizer(name: str, code: bool) -> Fetched:
    if Path(name).expanduser().is_dir():
        return Fetched("tokenizer", name, "a local folder: nothing to fetch")
    return _snapshot("tokenizer", name, None, _small_files(_listing("model.tokenizer", name, None), code))


def needed_files(files: Sequence[str], gguf_file: str | None, code: bool = False) -> list[str]:
    """Which files of a repository a job reads: of several formats of the weights, the one it will load."""
    small = _small_files(files, code)
    if gguf_file is not None:
        return [*small, gguf_file]
    first = next((name for name in _WEIGHTS if name in files), None)
    return [*small, *fnmatch.filter(files, _WEIGHTS[first])] if first else small


def _small_files(files: Sequence[str], code: bool) -> list[str]:
    endings = (*_SMALL, ".py") if code else _SMALL
    at_the_top = [name for name in files if "/" not in name and name.endswith(endings)]
    return [*at_the_top, *(name for name in files if name.startswith(_TEMPLATES))]


def fetch_data(config: JobConfig) -> Fetched:
    source = config.source
    if not isinstance(source, HFSource):
        paths = source.path if isinstance(source.path, list) else [source.path]  # type: ignore[attr-defined]
        remote = [str(path) for path in paths if "://" in str(path)]
        place = "read over the network by every worker" if remote else "local files: nothing to fetch"
        return Fetched("data", ", ".join(map(str, paths)), place)
    if Path(source.path).expanduser().exists():
        return Fetched("data", source.path, "a local folder: nothing to fetch")
    if source.streaming:
        raise ValueError(
            "source.streaming=true reads over the network while the job runs: set source.streaming=false to "
            "have the data fetched"
        )
    from pipeline.input.source import open_source

    index = open_source(source).scan()
    place = f"{index.num_rows:,} rows, in {_datasets_cache()}"
    return Fetched("data", f"{source.path}[{source.split}]", place, index.metadata.get("revision"))


def _listing(key: str, name: str, revision: str | None) -> list[str]:
    """The repository's files."""
    from huggingface_hub import HfApi, constants

    from pipeline.models.load_errors import explain_unreadable

    if constants.HF_HUB_OFFLINE:
        raise ValueError(f"{key}={name} cannot be fetched: HF_HUB_OFFLINE is set; unset it for this command")
    try:
        info = HfApi().model_info(name, revision=revision)
    except Exception as error:  # the hub's client, or the network's
        reason = explain_unreadable(name, "", error, key)
        raise ValueError(f"{key}={name} cannot be fetched: {reason}") from error
    return [file.rfilename for file in info.siblings or ()]


def _snapshot(what: str, name: str, revision: str | None, files: Sequence[str]) -> Fetched:
    from huggingface_hub import snapshot_download

    # By the name and not the commit, so that the cache remembers which commit the name is.
    place = snapshot_download(name, revision=revision, allow_patterns=list(files))
    # The cache names the folder after the commit.
    return Fetched(what, name, place, Path(place).name)


def _check(config: JobConfig, fetched: Sequence[Fetched]) -> None:
    """Find out here, from the files that were fetched, what would stop every worker."""
    from pipeline.models.load import inspect_model, load_tokenizer
    from pipeline.models.transformers_model import inspect_for_transformers

    model = config.model
    places = {item.what: item.place for item in fetched if item.commit}
    local = replace(
        model,
        path=places.get("model", model.path),
        tokenizer=places.get("tokenizer", model.tokenizer),
        revision=None,
    )
    if isinstance(config.engine, TransformersEngineConfig):
        inspect_for_transformers(local, config.engine)
    else:
        inspect_model(local)
    load_tokenizer(local)


def _datasets_cache() -> str:
    import datasets

    return str(datasets.config.HF_DATASETS_CACHE)


def report(fetched: Sequence[Fetched]) -> str:
    """What to print: what lies where, and how workers are told to use it."""
    lines = [str(item) for item in fetched]
    pins = {"model": "model.revision", "data": "source.revision"}
    keys = [f"{pins[item.what]}={item.commit}" for item in fetched if item.commit and item.what in pins]
    if keys:
        home = f"HF_HOME={os.environ['HF_HOME']} " if "HF_HOME" in os.environ else ""
        lines += ["", f"Workers run with: {home}HF_HUB_OFFLINE=1", f"The same again later: {' '.join(keys)}"]
    else:
        lines += ["", "Nothing comes from the hub: workers need no network (HF_HUB_OFFLINE=1 does no harm)."]
    return "\n".join(lines)


def _task(config: DictConfig) -> None:
    try:
        check_keys(config)
        job = OmegaConf.to_object(config)
        assert isinstance(job, JobConfig)
        print(report(prefetch(job)))
    except Exception as error:
        raise PastHydra from error


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is not None:
        sys.argv[1:] = arguments
    # Hydra makes its run directory whatever the task is: the job's own is not to be made by this.
    sys.argv += ["hydra.run.dir=.", "hydra.job_logging.root.handlers=[console]"]
    command_line(_task)
    return 0


if __name__ == "__main__":
    sys.exit(main())
