"""Whether a model folder's weight files are all there and whole, without reading the weights.

Knows: which files hold weights, and the frame of a safetensors file. Refuses to know: tensors, the hub
(whose own client checks what it fetched).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from pipeline.config import LoadFormat, ModelConfig

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt")
_INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """Sorted by name."""
    return sorted(file for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES)


def check_weight_files(config: ModelConfig) -> None:
    """A copy that broke off is found in a moment, not after a job was begun on it.

    Raises ValueError naming model.path, the file and the remedy. A name on the hub is not checked.
    """
    folder = Path(os.path.expanduser(config.path))
    # A GGUF file was opened for its configuration, and that is all there is to it.
    if config.load_format is LoadFormat.dummy or config.gguf_file or not folder.is_dir():
        return
    files = weight_files(folder)
    if not files:
        raise ValueError(
            f"model.path={config.path} has no weights (no file ending in {', '.join(WEIGHT_SUFFIXES)}): "
            "fetch the model again, or use model.load_format=dummy for random ones"
        )
    index = folder / _INDEX
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else set()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model.path={config.path}: {index} is damaged: fetch the model again") from error
    missing = sorted(named.difference(file.name for file in files))
    if missing:
        raise ValueError(f"model.path={config.path} lacks {', '.join(missing)}: fetch the model again")
    for file in files:
        if file.suffix == ".safetensors" and not _is_whole(file):
            raise ValueError(
                f"model.path={config.path}: {file.name} is cut short or no safetensors file: "
                "fetch the model again"
            )


def _is_whole(file: Path) -> bool:
    """A safetensors file: the header's length (8 bytes), the header (JSON), the tensors to its end."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= size - 8:
            return False
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False
    return size == 8 + length + max(ends, default=0)
