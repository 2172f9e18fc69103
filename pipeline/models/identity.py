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
from pipeline.models.load import InspectedModel

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")
# Read at both ends of a weight file: the head names every tensor, and no two trainings share both.
_SAMPLED_BYTES = 256 * 1024
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
        "model.tokenizer_hash": _hash(vocabulary),
        "model.chat_template": _hash(json.dumps(tokenizer.chat_template, sort_keys=True)),
        "model.revision": getattr(inspected.hf_config, "_commit_hash", None) or config.revision,
    }


def _weights(config: ModelConfig) -> str | None:
    """A hash of the weight files of a local folder; a hub's revision already names its weights."""
    folder = Path(os.path.expanduser(config.path))
    if config.load_format is LoadFormat.dummy or not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for file in sorted(f for f in folder.iterdir() if f.suffix in _WEIGHTS):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}:".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_SAMPLED_BYTES))
            stream.seek(max(size - _SAMPLED_BYTES, 0))
            digest.update(stream.read(_SAMPLED_BYTES))
    return digest.hexdigest()[:32]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
