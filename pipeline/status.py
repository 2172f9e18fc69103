"""Tells how far a job is: `python -m pipeline.status DIR`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.failures import explain
from pipeline.output.journal import Commit, Tail, read_tail
from pipeline.output.layout import journal_names, journal_path
from pipeline.output.progress import JobDirectory
from pipeline.report.status import Count, JobStatus, PartProgress, measure, render


def status(job: str | Path, now: float | None = None) -> JobStatus:
    """Reads the two ends of every journal, however long it is.

    Raises ValueError if the directory holds no job or a journal is damaged.
    """
    directory = JobDirectory.load(job)
    tails = [read_tail(journal_path(directory.path, name)) for name in journal_names(directory.path)]
    parts = [_progress(tail) for tail in tails if tail is not None]
    return measure(parts, directory.num_rows * directory.samples, time.time() if now is None else now)


def _progress(tail: Tail) -> PartProgress:
    return PartProgress(
        worker=tail.header.worker,
        started=tail.header.started,
        gpu_hour_usd=tail.header.gpu_hour_usd,
        points=tuple((commit.time, _count(commit)) for commit in tail.commits),
        whole=not tail.commits or tail.commits[0].seq == 0,
        closed=tail.closed.time if tail.closed else None,
    )


def _count(commit: Commit) -> Count:
    totals = commit.totals
    return Count(
        # a row generated again stands for the error before it
        results=totals.rows - totals.retried,
        errors=totals.errors - totals.retried,
        skipped=totals.skipped,
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("pipeline.status", description="How far, how fast, at what cost.")
    parser.add_argument("dir", help="the job's output.dir")
    parser.add_argument("--json", action="store_true", help="print numbers for machines")
    arguments = parser.parse_args(argv)
    try:
        state = status(arguments.dir)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error)
    print(json.dumps(dataclasses.asdict(state)) if arguments.json else render(state))
    return 0


if __name__ == "__main__":
    sys.exit(main())
