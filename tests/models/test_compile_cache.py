"""Many processes start at once on one empty compile cache, and a late one finds what they left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU"),
]
PROCESSES = 8
# Prints whether the compiled result is right, and how many graphs came from the cache.
SCRIPT = """
import torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
torch.set_num_threads(1)
layers = torch.nn.Linear(8, 24), torch.nn.SiLU(), torch.nn.RMSNorm(24), torch.nn.Linear(24, 8)
model = torch.nn.Sequential(*layers)
def step(x):
    return torch.softmax(model(x) * x, -1)
with torch.inference_mode():
    x = torch.randn(5, 8)
    got = torch.compile(step, fullgraph=True, dynamic=True)(x)
    print(torch.allclose(got, step(x), atol=1e-5), counters["inductor"]["fxgraph_cache_hit"])
"""


def start(folder: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_eight_cold_starts_on_one_cache(tmp_path: Path) -> None:
    running = [start(tmp_path) for _ in range(PROCESSES)]
    said = [process.communicate(timeout=600) for process in running]
    assert [process.returncode for process in running] == [0] * PROCESSES, said[0][1]
    assert {out.split()[0] for out, _ in said} == {"True"}
    late, _ = start(tmp_path).communicate(timeout=600)
    assert late.split() == ["True", "1"]
    # Nobody left a half-written entry behind.
    assert [
        path for path in tmp_path.rglob("*") if path.suffix == ".tmp" or path.name.startswith("tmp.")
    ] == []
