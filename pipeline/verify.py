"""Proves a job's output complete: `python -m pipeline.verify DIR`. Exit code 0 only then."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipeline.failures import explain
from pipeline.output.verify import Verdict, verify


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "pipeline.verify", description="Reads source, parts and dataset again and compares them."
    )
    parser.add_argument("dir", help="the job's output.dir")
    arguments = parser.parse_args(argv)
    try:
        verdict = verify(arguments.dir)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error)
    print(_render(verdict))
    return 0 if verdict.complete else 1


def _render(verdict: Verdict) -> str:
    found = (
        f"{verdict.num_results:,} results ({verdict.num_errors:,} errors, {verdict.num_skipped:,} skipped)"
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
