"""Where a figure was measured: versions, GPU, commit. Knows this machine; refuses to know engines."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import pipeline

_REPOSITORY = Path(pipeline.__file__).resolve().parent.parent
_PACKAGES = ("torch", "transformers", "triton", "fa3-fwd", "flash-attn", "flash-attn-3")
_GIT_S = 10.0


@dataclass(frozen=True)
class GpuMemory:
    """Most that this process held at once, in GiB: in tensors, and with what the allocator keeps."""

    allocated_gib: float
    reserved_gib: float


def describe_environment() -> dict[str, Any]:
    """JSON-ready. A package that is not installed is null, the commit too outside of a checkout."""
    gpus = torch.cuda.device_count()
    return {
        "tokenmill": pipeline.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if gpus else None,
        "gpus_visible": gpus,
        "cpu": platform.machine(),
    }


def peak_gpu_memory(device: torch.device) -> dict[str, float] | None:
    """Since the process began; None without a GPU."""
    if device.type != "cuda":
        return None
    peak = GpuMemory(
        torch.cuda.max_memory_allocated(device) / 2**30, torch.cuda.max_memory_reserved(device) / 2**30
    )
    return asdict(peak)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, `-dirty` behind it if files differ."""
    # An installed package may lie inside somebody else's checkout.
    if not (_REPOSITORY / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
