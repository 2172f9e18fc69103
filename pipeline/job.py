"""The whole flow on one screen: rows -> requests -> engine -> writer -> commit.

`run_job` reads from top to bottom; `prepare.py` holds what has to be found out first.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pipeline.cluster.signals import StopSignals
from pipeline.config import JobConfig
from pipeline.engine import Engine
from pipeline.engine.transformers_backend import TransformersEngine
from pipeline.output.layout import TIMELINE
from pipeline.prepare import PreparedJob, prepare
from pipeline.prompts.read_ahead import ReadAhead
from pipeline.report.budget import Budget
from pipeline.report.outcome import Outcome
from pipeline.report.progress import ProgressDisplay
from pipeline.report.start_up import StartUp
from pipeline.report.summary import StepTimes, closing_summary, start_block
from pipeline.report.timeline import write_timeline


def run_job(config: JobConfig, worker: str = "w0", start_up: StartUp | None = None) -> Outcome:
    """Run a job, or go on with it, until it is complete or told to stop.

    start_up: what has taken its time before.
    Raises ValueError or OSError for what the user can mend; completions finished by then are kept.
    """
    started = time.time()
    start_up = start_up or StartUp()
    with prepare(config) as job:
        start_up.finished("preparation")
        print(start_block(job.facts, job.sampling, job.first_prompt), file=sys.stderr)
        outcome = Outcome(config, job.remaining.num_results, job.num_results, started)
        if job.remaining.num_results:
            _generate(config, job, outcome, worker, start_up)
    print(
        "\n\n".join(filter(None, [outcome.showcase.text(), closing_summary(outcome.summary(), config.cost)]))
    )
    return outcome


def _generate(config: JobConfig, job: PreparedJob, outcome: Outcome, worker: str, start_up: StartUp) -> None:
    engine = job.load_engine(start_up)
    outcome.start_up = start_up
    print(f"ready after {start_up.text()}", file=sys.stderr)
    budget = Budget(config.cost, outcome.started)
    with (
        StopSignals() as signals,
        job.writer(worker, outcome.started) as writer,
        ReadAhead(job.requests(), config.prompt.prefetch_rows) as requests,
        ProgressDisplay(job.num_results, config.report, config.cost, outcome.rows_before) as display,
    ):

        def should_stop() -> bool:
            # Asked once a step: a finished row never waits with its commit for the next one to finish.
            writer.commit_if_due()
            return bool(signals.received) or budget.spent

        for completion in engine.generate(requests, should_stop):
            writer.append(completion)
            outcome.add(completion)
            display.update(outcome.progress(engine.stats))
        outcome.stopped_by = signals.received or budget.reason
    _account(config, engine, outcome, worker)


def _account(config: JobConfig, engine: Engine | TransformersEngine, outcome: Outcome, worker: str) -> None:
    """What the engine tells of its steps; transformers' tells nothing."""
    if not isinstance(engine, Engine):
        return
    stats, on_gpu = engine.stats, engine.loaded.device.type == "cuda"
    outcome.steps = StepTimes(on_gpu, stats.counters.num_steps, stats.busy_seconds, stats.phase_seconds)
    if config.engine.timeline:
        folder = Path(config.output.dir) / TIMELINE
        outcome.timeline = write_timeline(folder, worker, engine.timeline, config.engine.timeline_after)
