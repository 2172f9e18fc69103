"""Compacts a job's parts into a dataset: `python -m pipeline.finalize DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pipeline.failures import explain
from pipeline.output.dataset import DatasetFormat
from pipeline.output.finalize import Selection, finalize


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "pipeline.finalize", description="Writes DIR/dataset from the parts, in the order of the input."
    )
    parser.add_argument("dir", help="the job's output.dir")
    parser.add_argument(
        "--format",
        choices=[form.value for form in DatasetFormat],
        default=DatasetFormat.arrow.value,
        help="arrow: for datasets.load_from_disk; parquet: under dataset/parquet",
    )
    parser.add_argument("--partial", action="store_true", help="take what is there of an unfinished job")
    parser.add_argument("--drop-failed", action="store_true", help="leave out rows in error or skipped")
    arguments = parser.parse_args(argv)
    selection = Selection(partial=arguments.partial, drop_failed=arguments.drop_failed)
    try:
        done = finalize(arguments.dir, DatasetFormat(arguments.format), selection)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error)
    print(f"{done.num_rows:,} rows in {len(done.files)} files: {done.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
