"""Shows that a job's memory does not grow with its rows: `python benchmarks/memory_flat.py [--rows N]`.

A whole job, from the Parquet file to the parts, over many short and different prompts. The model is a doll
that takes next to no time, so that what is measured is everything around it: reading, prompts, the engine's
books, the writer. Prints resident memory against rows committed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).resolve().parent.parent
_TOKENIZER = REPOSITORY / "pipeline" / "assets" / "tiny-model"
_INTERVAL_S = 0.5


class Sample(NamedTuple):
    """Resident memory when so many rows were committed."""

    rows: int
    megabytes: float
    seconds: float


def measure(folder: Path, num_rows: int, *changes: str) -> list[Sample]:
    """Runs the job in an own process and watches it. Raises CalledProcessError if it fails."""
    _make_model(folder / "model")
    _make_prompts(folder / "prompts.parquet", num_rows)
    command = [
        *(sys.executable, "-m", "pipeline.run", "conf=generate", "cost=free"),
        *("source.path=prompts.parquet", "prompt.column=text", "model.path=model", "output.dir=job"),
        *("sampling=diverse", "sampling.n=1", "sampling.max_tokens=2", "sampling.top_p=1"),
        # small blocks, so that each prompt leaves some in the prefix cache
        *("engine.max_num_seqs=256", "engine.max_num_batched_tokens=2048", "engine.block_size=4"),
        *("engine.determinism=fast", "output.commit_interval_s=0.5", "output.completion_ids=true"),
        *("report.interval_s=1000", "report.show_completions=0", *changes),
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    samples: list[Sample] = []
    started = time.monotonic()
    log = folder / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=errors
        ) as process,
    ):
        while process.poll() is None:
            rows = _committed(folder / "job" / "journal")
            megabytes = _resident_megabytes(process.pid)
            if rows and megabytes:
                samples.append(Sample(rows, megabytes, time.monotonic() - started))
            time.sleep(_INTERVAL_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=log.read_text())
    return samples


def growth(samples: list[Sample], after: int) -> float:
    """Megabytes by which memory rose above what it was when `after` rows were done."""
    settled = next(sample for sample in samples if sample.rows >= after)
    return max(sample.megabytes for sample in samples if sample.rows >= after) - settled.megabytes


def _make_model(path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(_TOKENIZER / name, path / name)


def _make_prompts(path: Path, num_rows: int) -> None:
    numbers = np.random.default_rng(0).permutation(num_rows)
    texts = pa.array([f"Compute {number} + {row}." for row, number in enumerate(numbers)])
    pq.write_table(pa.table({"text": texts}), path, row_group_size=10_000)


def _committed(journals: Path) -> int:
    rows = 0
    for journal in journals.glob("*.jsonl"):
        lines = journal.read_text().split("\n")
        rows += sum(json.loads(line).get("rows", 0) for line in lines[:-1])
    return rows


def _resident_megabytes(pid: int) -> float | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(found[0]) / 1024 if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Resident memory of a job against its rows.")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--settled", type=int, default=20_000, help="rows after which memory must not grow")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(Path(folder), arguments.rows)
    step = max(arguments.rows // 20, 1)
    shown = -step
    print(f"{'rows':>10} {'seconds':>8} {'MB':>8}")
    for sample in samples:
        if sample.rows >= shown + step or sample is samples[-1]:
            shown = sample.rows
            print(f"{sample.rows:>10,} {sample.seconds:>8.1f} {sample.megabytes:>8.1f}")
    grown = growth(samples, arguments.settled)
    print(f"growth after {arguments.settled:,} rows: {grown:.1f} MB")


if __name__ == "__main__":
    main()
