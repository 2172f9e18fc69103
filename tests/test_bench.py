"""conf=bench on a doll of a model: exact token counts, the figures that are promised, refusals by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pipeline
from pipeline.bench.measure import Run, median_run
from pipeline.bench.sizes import engine_size
from pipeline.bench.workloads import RowLength, make_requests, row_lengths, sampling_of
from pipeline.config import BenchConfig, OutputConfig, SamplingConfig, Workload

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
}
SMALL = ("bench.workload=B", "bench.rows=4", "bench.new_tokens=8", "bench.repetitions=2")


@pytest.fixture
def doll(tmp_path: Path) -> Path:
    """A folder with a configuration and nothing else: no weights, no tokenizer."""
    folder = tmp_path / "doll"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture
def bench(command: Callable[..., Any], doll: Path, tmp_path: Path) -> Callable[..., Any]:
    """Run conf=bench on the doll; the result that was written, with the table under `table`."""

    def run(*arguments: str) -> dict[str, Any]:
        ended = command("conf=bench", f"model.path={doll}", f"output.dir={tmp_path / 'out'}", *arguments)
        assert ended.code == 0, ended.err
        table, _, path = ended.out.rstrip().rpartition("\n\n")
        return {"table": table, "path": path, **json.loads(Path(path).read_text())}

    return run


class TestCommand:
    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_native(self, bench, mode):
        result = bench(*SMALL, f"engine.mode={mode}")
        assert Path(result["path"]).name == f"bench-B-native-{mode}.json"
        assert (result["rows"], result["prompt_tokens"], result["new_tokens"]) == (4, 4 * 128, 4 * 8)
        assert [run["new_tokens"] for run in result["runs"]] == [32, 32]
        median = result["median"]
        assert median["steps"] >= 8 and 0 < median["busy_share"] <= 1
        assert median["tokens_per_s"] == pytest.approx(32 / median["seconds"])
        assert median["ms_per_step"] == pytest.approx(1e3 * median["seconds"] / median["steps"])
        host = sum(median["host_ms_per_step"].values())
        assert host == pytest.approx(median["ms_per_step"], rel=0.2)
        assert set(result["start_up_seconds"]) == {"weights", "engine", "warm_up"}
        assert result["environment"]["torch"] and result["peak_gpu_memory"] is None
        assert result["config"]["engine"]["max_num_seqs"] == 4
        assert "tokens/s" in result["table"] and "host ms/step" in result["table"]

    def test_transformers(self, bench):
        result = bench(*SMALL, "engine=transformers", "engine.cuda_graphs=false")
        assert Path(result["path"]).name == "bench-B-transformers-sync.json"
        assert [run["new_tokens"] for run in result["runs"]] == [32, 32]
        assert result["median"]["steps"] >= 8 and result["median"]["busy_share"] is None
        assert result["config"]["engine"]["block_size"] == 256

    def test_mixed_lengths_drawn_with_alternatives_and_a_timeline(self, bench):
        result = bench(
            "bench.workload=C",
            "bench.rows=3",
            "bench.repetitions=1",
            "bench.new_tokens=5",
            "sampling.temperature=1",
            "output.topk=4",
            "engine.timeline=true",
            "engine.timeline_after=1",
        )
        lengths = json.loads(
            (Path(pipeline.__file__).parent / "assets" / "workload_mix.json").read_text(encoding="utf-8")
        )
        assert result["prompt_tokens"] == sum(prompt for prompt, _ in lengths[:3])
        assert result["new_tokens"] == 15
        trace = Path(result["path"]).with_name("bench-C-native-sync-timeline.json")
        assert json.loads(trace.read_text())["traceEvents"] and trace.name in result["timeline"]

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("sampling.n=2",), "sampling.n=2"),
            (("bench.rows=0",), "bench.rows=0"),
            (("bench.workload=D",), "bench.workload"),
            (("engine=transformers", "output.topk=3"), "output.topk=3"),
            (("bench.new_tokens=5000",), "max_position_embeddings"),
        ],
    )
    def test_what_cannot_be_measured_is_refused_by_name(self, command, doll, tmp_path, arguments, says):
        ended = command("conf=bench", f"model.path={doll}", f"output.dir={tmp_path}", *arguments)
        assert ended.code == 1 and says in ended.err
        assert not list(tmp_path.glob("bench-*.json"))

    def test_needs_neither_datasets_nor_arrow(self, doll, tmp_path):
        code = (
            "import runpy, sys\n"
            "for name in ('datasets', 'pyarrow'):\n"
            "    sys.modules[name] = None\n"
            "runpy.run_module('pipeline.run', run_name='__main__')\n"
        )
        command = [sys.executable, "-c", code, "conf=bench", *SMALL]
        command += [f"model.path={doll}", f"output.dir={tmp_path / 'out'}", "engine.mode=async"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(pipeline.__file__).parents[1])
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out" / "bench-B-native-async.json").exists()

    def test_the_shipped_shape_is_a_llama_of_eight_billion(self):
        shape = json.loads((Path(pipeline.__file__).parent / "assets/llama-8b/config.json").read_text())
        h, i, v = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
        kv = shape["num_key_value_heads"] * shape["head_dim"]
        layer = 2 * h * h + 2 * h * kv + 3 * h * i + 2 * h
        assert shape["num_hidden_layers"] * layer + 2 * v * h + h == 8_030_261_248


class TestWorkloads:
    def test_rows_of_each(self):
        assert row_lengths(BenchConfig(Workload.A)) == [RowLength(128, 8192)] * 32
        assert row_lengths(BenchConfig(Workload.B)) == [RowLength(128, 512)] * 32
        mix = row_lengths(BenchConfig(Workload.C))
        assert len(mix) == 1024 and len(set(mix)) > 900
        assert row_lengths(BenchConfig(Workload.C, rows=1026))[1024:] == mix[:2]
        assert row_lengths(BenchConfig(Workload.A, rows=2, new_tokens=7)) == [RowLength(128, 7)] * 2

    def test_prompts_are_exact_and_of_the_seed(self):
        sampling = sampling_of(SamplingConfig(), OutputConfig(dir="."))
        rows = [RowLength(5, 3), RowLength(9, 1)]
        first, again, other = (make_requests(rows, 50, sampling, seed) for seed in (0, 0, 1))
        assert [(len(r.prompt_ids), r.params.max_tokens) for r in first] == rows
        assert all(r.params.ignore_eos and r.params.temperature == 0 for r in first)
        assert [r.prompt_ids.tolist() for r in first] == [r.prompt_ids.tolist() for r in again]
        assert first[0].prompt_ids.tolist() != other[0].prompt_ids.tolist()
        assert all(0 <= r.prompt_ids.min() and r.prompt_ids.max() < 50 for r in first)

    def test_sizes_are_no_larger_than_the_workload(self):
        assert engine_size("max_num_seqs", Workload.C, None, "native") == 192
        assert engine_size("max_num_seqs", Workload.C, 10, "native") == 10
        assert engine_size("block_size", Workload.B, 10, "transformers") == 256
        assert engine_size("max_num_batched_tokens", None, None, "native") == 2048

    def test_the_median_is_a_run_that_was(self):
        runs = [Run(seconds, 10, 5, None, None) for seconds in (3.0, 1.0, 2.0)]
        assert median_run(runs).seconds == 2.0 and median_run(runs[:2]).seconds == 1.0
