"""Proves a job's output complete: `python -m pipeline.verify DIR`. Exit code 0 only then."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.failures import explain
from pipeline.output.manifest import write_manifest
from pipeline.output.remote_copy import local_copy, publish, renamed
from pipeline.output.verdict import Verdict
from pipeline.output.verify import verify

# Beside job.json, unless another place is asked for.
_MANIFEST = "manifest.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "pipeline.verify", description="Reads source, parts and dataset again and compares them."
    )
    parser.add_argument("dir", help="the job's output.dir")
    parser.add_argument(
        "--manifest",
        nargs="?",
        const="",
        metavar="FILE",
        help=f"write what was found, with counts and hashes of each part and file (DIR/{_MANIFEST})",
    )
    arguments = parser.parse_args(argv)
    try:
        with local_copy(arguments.dir) as job:
            verdict = verify(job)
            if arguments.manifest is not None:
                write_manifest(job, verdict, Path(arguments.manifest or job / _MANIFEST))
            if arguments.manifest == "":
                publish(job, arguments.dir, _MANIFEST)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error)
    print(renamed(_render(verdict), job, arguments.dir))
    return 0 if verdict.complete else 1


def _render(verdict: Verdict) -> str:
    found = (
        f"{verdict.num_results:,} results ({verdict.num_errors:,} errors, {verdict.num_skipped:,} skipped)"
        + (f", {verdict.num_void:,} rows made again or too late" if verdict.num_void else "")
        + (", finalised dataset equal" if verdict.has_dataset and verdict.complete else "")
    )
    if verdict.complete:
        return f"complete: {found}"
    lines = list(verdict.problems)
    if verdict.num_problems > len(lines):
        lines.append(f"… and {verdict.num_problems - len(lines):,} more")
    return "\n".join([*lines, f"NOT complete: {verdict.num_problems:,} problems; {found}"])


if __name__ == "__main__":
    sys.exit(main())
