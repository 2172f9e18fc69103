"""One benchmark on one screen: model -> engine -> warm-up -> timed runs -> table and JSON.

Knows the order of things and what is reported; refuses to know what a workload is or how a run is timed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.bench.environment import describe_environment, peak_gpu_memory
from pipeline.bench.measure import Run, median_run, timed_run
from pipeline.bench.table import as_table
from pipeline.bench.workloads import RowLength, make_requests, row_lengths, sampling_of
from pipeline.config import EngineConfig, EngineMode, JobConfig, ModelConfig, TransformersEngineConfig
from pipeline.engine import Engine
from pipeline.engine.continuous_batching import runs_async
from pipeline.engine.transformers_backend import TransformersEngine
from pipeline.models.load import LoadedModel, load_model
from pipeline.models.transformers_model import load_for_transformers
from pipeline.report.timeline import write_timeline
from pipeline.request import SamplingParams

_WARM_UP_TOKENS = 16
# Parts of the configuration that a figure depends on.
_REPORTED = ("bench", "model", "engine", "sampling", "output", "seed")


@dataclass(frozen=True)
class StartUp:
    """Seconds before the first timed run: weights, engine (cache and graphs), warm-up."""

    weights: float
    engine: float
    warm_up: float


def run_benchmark(config: JobConfig) -> Path:
    """Measure, print a table, write `bench-<workload>-<engine>-<mode>.json`; return its path.

    Raises ValueError for settings that cannot work, RuntimeError for a run that is not whole.
    """
    assert config.bench.workload is not None
    sampling, rows = sampling_of(config.sampling, config.output), row_lengths(config.bench)
    config = replace(config, model=_fitted(config, rows))
    started = time.perf_counter()
    loaded = _load(config)
    load_seconds = time.perf_counter() - started
    with _opened(config, loaded, sampling) as engine:
        engine_seconds = time.perf_counter() - started - load_seconds
        warm_rows = _warm_up_rows(config.engine, rows)
        warm = timed_run(engine, make_requests(warm_rows, loaded.vocab_size, sampling, config.seed))
        runs = [
            timed_run(engine, make_requests(rows, loaded.vocab_size, sampling, config.seed + repetition))
            for repetition in range(1, config.bench.repetitions + 1)
        ]
        result = {
            **_subject(config, loaded, rows),
            **_figures(runs),
            "start_up_seconds": asdict(StartUp(load_seconds, engine_seconds, warm.seconds)),
            "peak_gpu_memory": peak_gpu_memory(loaded.device),
        }
        name = f"bench-{result['workload']}-{result['engine']}-{result['mode']}"
        result["timeline"] = _write_timeline(config, engine, name)
    result |= {"environment": describe_environment(), "config": _plain_config(config)}
    path = Path(config.output.dir) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{as_table(result)}\n\n{path}")
    return path


def _fitted(config: JobConfig, rows: list[RowLength]) -> ModelConfig:
    """The model, no longer than the rows: a cache for longer ones is not what is measured."""
    longest = max(row.prompt + row.new for row in rows)
    return replace(config.model, max_model_len=config.model.max_model_len or longest)


def _load(config: JobConfig) -> LoadedModel:
    if isinstance(config.engine, TransformersEngineConfig):
        return load_for_transformers(config.model, config.engine)
    return load_model(config.model)


@contextlib.contextmanager
def _opened(
    config: JobConfig, loaded: LoadedModel, sampling: SamplingParams
) -> Iterator[Engine | TransformersEngine]:
    """The engine, ready to run: what it makes once is there before any run."""
    if isinstance(config.engine, TransformersEngineConfig):
        engine = TransformersEngine(loaded, config.engine, sampling=sampling)
        with engine.session():
            yield engine
    else:
        yield Engine(
            loaded,
            config.engine,
            seed=config.seed,
            logprobs=config.output.logprobs,
            num_topk=config.output.topk,
        )


def _write_timeline(config: JobConfig, engine: Engine | TransformersEngine, name: str) -> str | None:
    """A window of the last run's steps beside the result, if engine.timeline asks for it: where it lies."""
    if not config.engine.timeline or not isinstance(engine, Engine):
        return None
    folder = Path(config.output.dir)
    return write_timeline(folder, f"{name}-timeline", engine.timeline, config.engine.timeline_after)


def _warm_up_rows(engine: EngineConfig, rows: list[RowLength]) -> list[RowLength]:
    """A batch of the workload's prompts and a few tokens each; for transformers the whole workload.

    Its graphs of steps with prompts are captured by the length of all contexts together, as they occur.
    """
    if isinstance(engine, TransformersEngineConfig):
        return rows
    return [row._replace(new=min(row.new, _WARM_UP_TOKENS)) for row in rows[: engine.max_num_seqs]]


def _subject(config: JobConfig, loaded: LoadedModel, rows: list[RowLength]) -> dict[str, Any]:
    """What was measured. mode: the one that ran, where the configuration leaves it open."""
    assert config.bench.workload is not None
    is_native = not isinstance(config.engine, TransformersEngineConfig)
    overlaps = runs_async(config.engine.mode, loaded.device)
    if is_native and config.engine.mode is not None:
        overlaps = config.engine.mode is EngineMode.async_
    return {
        "workload": config.bench.workload.value,
        "engine": "native" if is_native else "transformers",
        "mode": "async" if overlaps else "sync",
        "device": str(loaded.device),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "attention": loaded.model.config._attn_implementation,
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "rows": len(rows),
        "prompt_tokens": sum(row.prompt for row in rows),
        "new_tokens": sum(row.new for row in rows),
    }


def _figures(runs: list[Run]) -> dict[str, Any]:
    seconds = [run.seconds for run in runs]
    return {
        "median": _plain_run(median_run(runs)),
        "spread": {"seconds": [min(seconds), max(seconds)]},
        "runs": [_plain_run(run) for run in runs],
    }


def _plain_run(run: Run) -> dict[str, Any]:
    return {**asdict(run), "tokens_per_s": run.tokens_per_s, "ms_per_step": run.ms_per_step}


def _plain_config(config: JobConfig) -> dict[str, Any]:
    """As resolved; an Enum is written as its value."""
    whole = asdict(config)
    plain: dict[str, Any] = json.loads(json.dumps({name: whole[name] for name in _REPORTED}))
    return plain
