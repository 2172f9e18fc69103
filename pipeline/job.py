"""The whole flow on one screen: units -> rows -> requests -> engine -> writer -> commit.

`run_worker` reads from top to bottom; `prepare.py` holds what has to be found out first, `cluster/` who
makes what when many work on one job. Imports no torch: whoever brings another engine needs none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.signals import StopSignals
from pipeline.cluster.work import Work
from pipeline.config import JobConfig
from pipeline.output.layout import TIMELINE
from pipeline.output.writer import OutputWriter
from pipeline.prompts.read_ahead import ReadAhead
from pipeline.report.budget import Budget
from pipeline.report.outcome import Outcome
from pipeline.report.progress import ProgressDisplay
from pipeline.report.start_up import StartUp
from pipeline.report.summary import StepTimes, closing_summary, start_block
from pipeline.report.timeline import write_timeline
from pipeline.worker_job import JobEngine, TimedEngine, WorkerJob


def run_job(config: JobConfig, worker: str = "w0", start_up: StartUp | None = None) -> Outcome:
    """Work on a job, alone or beside others, until nothing is left to do or it is told to stop.

    start_up: what has taken its time before.
    Raises ValueError or OSError for what the user can mend; completions finished by then are kept.
    """
    from pipeline.prepare import prepare

    started = time.time()
    start_up = start_up or StartUp()
    job = prepare(config, worker, started)
    start_up.finished("preparation")
    print(start_block(job.facts, job.sampling, job.first_prompt), file=sys.stderr)
    outcome = run_worker(job, started, start_up)
    print(
        "\n\n".join(filter(None, [outcome.showcase.text(), closing_summary(outcome.summary(), config.cost)]))
    )
    return outcome


def run_worker(job: WorkerJob, started: float, start_up: StartUp | None = None) -> Outcome:
    """started: since when this process costs money, as time.time tells."""
    start_up = start_up or StartUp()
    outcome = Outcome(job.config, job.claims.count_missing(), job.num_results, started)
    budget = Budget(job.config.cost, started)
    with StopSignals() as signals, Heartbeat(job.member, job.claims.held, job.config.cluster.heartbeat_s):

        def stopped() -> bool:
            return bool(signals.received) or budget.spent or job.limit.is_over

        writer = job.writer()
        work = Work(job.claims, stopped, writer.commit)
        # A worker for whom nothing is left must not load a model to find out.
        engine = signals.unless_stopped(lambda: job.load_engine(start_up)) if work.begin() else None
        if engine is not None:
            job.member.note_loaded()
            outcome.start_up = start_up
            print(f"ready after {start_up.text()}", file=sys.stderr)
            _generate(job, engine, work, writer, outcome, stopped)
            _account(job, engine, outcome)
        earlier = signals.received or budget.reason
        outcome.end(
            earlier or job.limit.reason,
            work.num_others,
            work.is_complete,
            out_of_time=job.limit.was_felt and not earlier,
        )
    return outcome


def _generate(
    job: WorkerJob,
    engine: JobEngine,
    work: Work,
    writer: OutputWriter,
    outcome: Outcome,
    stopped: Callable[[], bool],
) -> None:
    config = job.config
    with (
        writer,
        ReadAhead(job.requests(work), config.prompt.prefetch_rows) as requests,
        work,
        ProgressDisplay(job.num_results, config.report, config.cost, outcome.rows_before) as display,
    ):

        def should_stop() -> bool:
            # Asked once a step: a finished row never waits with its commit for the next one to finish.
            writer.commit_if_due()
            job.member.tick()
            return stopped()

        for completion in engine.generate(requests, should_stop, job.claims.admit):
            if writer.append(completion):
                outcome.add(completion)
                display.update(outcome.progress(engine.stats))
                job.member.note_work(*outcome.work(engine.stats))


def _account(job: WorkerJob, engine: JobEngine, outcome: Outcome) -> None:
    """What the engine tells of its steps."""
    if not isinstance(engine, TimedEngine):
        return
    stats: Any = engine.stats
    settings, on_gpu = job.config.engine, engine.loaded.device.type == "cuda"
    outcome.steps = StepTimes(on_gpu, stats.counters.num_steps, stats.busy_seconds, stats.phase_seconds)
    if settings.timeline:
        folder, worker = Path(job.config.output.dir) / TIMELINE, job.member.record.worker
        outcome.timeline = write_timeline(folder, worker, engine.timeline, settings.timeline_after)
