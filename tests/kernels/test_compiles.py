"""The kernels compile for a Hopper GPU without one: no spilled registers, wide loads, tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

REPOSITORY = Path(__file__).resolve().parents[2]


def test_all_kernels_compile_without_spilling(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    script = Path(__file__).with_name("compile_for_hopper.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    kernels = {line["name"]: line for line in map(json.loads, run.stdout.splitlines())}
    assert len(kernels) == 21
    for name, kernel in kernels.items():
        assert kernel["spilled_bytes"] == 0, name
        assert kernel["shared_memory"] <= 227 * 1024, name
        assert kernel["wgmma"] == name.startswith("prefill"), name
    assert kernels["write"]["vector_loads"]
    # Three programs of the shape that matters most fit on an SM.
    decode = kernels["decode bf16 128 page 64"]
    assert 3 * decode["shared_memory"] <= 227 * 1024 and 3 * 128 * decode["registers"] <= 65536
