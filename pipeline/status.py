"""Tells how far a job is, over all of its workers: `python -m pipeline.status DIR`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.cluster.processes import Process
from pipeline.cluster.survey import PartEnd, survey
from pipeline.cluster.workers import WorkerRecord
from pipeline.config import ClusterConfig
from pipeline.failures import explain
from pipeline.output.journal import Commit, Totals
from pipeline.output.progress import JobDirectory
from pipeline.report.status import (
    WINDOW_S,
    Count,
    JobStatus,
    PartProgress,
    State,
    WorkerProgress,
    measure,
)
from pipeline.report.status_text import render
from pipeline.store import Store

_LEASE_S = ClusterConfig().lease_s


def status(
    job: str | Path, now: float | None = None, lease_s: float = _LEASE_S, store: Store | None = None
) -> JobStatus:
    """Reads worker records, the ends of journals, and leases; no rows.

    now: seconds since 1970. lease_s: a worker silent for so long is called stale. Raises ValueError if the
    directory holds no job, or a journal or lease is damaged, OSError.
    """
    directory = JobDirectory.load(job, store)
    found = survey(directory.path, directory.store, len(directory.units), WINDOW_S)
    here = Process.current()
    parts = [_part(part) for part in found.parts]
    workers = [_worker(record, here) for record in found.records]
    return measure(parts, workers, directory.num_results, time.time() if now is None else now, lease_s)


def _part(part: PartEnd) -> PartProgress:
    commits = [commit for commit in (part.earlier, part.last) if commit is not None]
    return PartProgress(
        incarnation=part.header.incarnation,
        started=part.header.started,
        points=tuple(_point(commit) for commit in commits),
        whole=not commits or commits[0].seq == 0,
        void=_count(part.void),
    )


def _point(commit: Commit) -> tuple[float, Count]:
    return commit.time, _count(commit.totals)


def _count(totals: Totals) -> Count:
    return Count(
        # a row generated again stands for the error before it
        results=totals.rows - totals.retried,
        errors=totals.errors - totals.retried,
        skipped=totals.skipped,
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
    )


def _worker(record: WorkerRecord, here: Process) -> WorkerProgress:
    return WorkerProgress(
        incarnation=record.incarnation,
        worker=record.worker,
        started=record.started,
        loaded=record.loaded,
        beat=record.beat,
        busy_s=record.busy_s,
        gpu_hour_usd=record.gpu_hour_usd,
        ended=record.ended is not None,
        is_gone=record.process.is_known_gone_to(here),
    )


def as_json(state: JobStatus) -> str:
    """All numbers, what follows from them included, on one line."""
    derived = {
        "complete": state.complete,
        "eta_s": state.eta_s,
        "mean_tokens_per_s": state.mean_tokens_per_s,
        "usd_per_million_tokens": state.usd_per_million_tokens,
        **{f"num_{one.value}": state.num_workers(one) for one in State},
    }
    return json.dumps({**dataclasses.asdict(state), **derived})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("pipeline.status", description="How far, how fast, at what cost.")
    parser.add_argument("dir", help="the job's output.dir")
    parser.add_argument("--json", action="store_true", help="print numbers for machines")
    parser.add_argument("--watch", type=float, metavar="SECONDS", help="again every so often until complete")
    parser.add_argument(
        "--lease-s",
        type=float,
        default=_LEASE_S,
        metavar="SECONDS",
        help="call a worker stale that is silent for so long (default: %(default)g)",
    )
    arguments = parser.parse_args(argv)
    try:
        while True:
            state = status(arguments.dir, lease_s=arguments.lease_s)
            print(as_json(state) if arguments.json else render(state), flush=True)
            if not arguments.watch or state.complete:
                return 0
            time.sleep(arguments.watch)
            if not arguments.json:
                print()
    except (Exception, KeyboardInterrupt) as error:
        return explain(error)


if __name__ == "__main__":
    sys.exit(main())
