"""What makes a model the same model on another day or disk: hashes of its parts.

Knows which files and texts decide what a model says; refuses to know where they lie. Part of a
job's fingerprint, so that a resumed job never mixes two models.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pipeline.config import LoadFormat, ModelConfig
from pipeline.models.adapter import adapter_identity
from pipeline.models.load import InspectedModel
from pipeline.models.weight_files import weight_files

# A file up to this size is read whole. Of a larger one: its two ends, of which the first names every tensor,
# and pieces spread evenly, since a training may have changed a few layers in the middle only.
_WHOLE_BYTES = 64 * 2**20
_END_BYTES = 256 * 1024
_PIECES, _PIECE_BYTES = 2048, 4096
# Facts of a configuration's origin, not of the model.
_IGNORED = ("_name_or_path", "transformers_version", "_commit_hash", "_attn_implementation")


def model_identity(config: ModelConfig, inspected: InspectedModel, tokenizer: Any) -> dict[str, str | None]:
    """Keys of the fingerprint: configuration, weights, tokenizer, chat template, pinned revision."""
    hf_config = inspected.hf_config.to_dict()
    for name in _IGNORED:
        hf_config.pop(name, None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        vocabulary = backend.to_str()
    else:
        vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return {
        "model.config": _hash(json.dumps(hf_config, sort_keys=True, default=str)),
        "model.weights": _weights(config),
        "model.adapter_hash": adapter_identity(config),
        "model.tokenizer_hash": _hash(vocabulary),
        "model.chat_template": _hash(json.dumps(tokenizer.chat_template, sort_keys=True)),
        "model.revision": inspected.config.revision,
    }


def _weights(config: ModelConfig) -> str | None:
    """A hash of the weight files of a local folder; a hub's revision already names its weights."""
    folder = Path(os.path.expanduser(config.path))
    if config.load_format is LoadFormat.dummy or not folder.is_dir():
        return None
    digest = hashlib.sha256()
    files = [folder / config.gguf_file] if config.gguf_file else weight_files(folder)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.suffix if config.gguf_file else file.name}:{size}:".encode())
        with file.open("rb") as stream:
            for start, length in _sampled(size):
                stream.seek(start)
                digest.update(stream.read(length))
    return digest.hexdigest()[:32]


def _sampled(size: int) -> list[tuple[int, int]]:
    """(start, length) of what is read of a file."""
    if size <= _WHOLE_BYTES:
        return [(0, size)]
    pieces = [(size * i // _PIECES, _PIECE_BYTES) for i in range(1, _PIECES)]
    return [(0, _END_BYTES), *pieces, (size - _END_BYTES, _END_BYTES)]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
