"""Compacts a job's parts into a dataset: `python -m pipeline.finalize DIR`, also while the job runs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from pipeline.cluster.publish import Publisher
from pipeline.failures import explain
from pipeline.output.dataset import DatasetFormat, Sharding
from pipeline.output.finalize import Selection, chosen_sharding, finalize
from pipeline.output.layout import DATASET
from pipeline.output.progress import JobDirectory
from pipeline.output.published import Published
from pipeline.output.remote_copy import local_copy, publish, renamed
from pipeline.store import is_remote


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        _require_fitting(arguments)
        if arguments.rolling and not _publish(arguments):
            return 0
        with local_copy(arguments.dir) as job:
            done = finalize(
                job,
                None if arguments.format is None else DatasetFormat(arguments.format),
                Selection(partial=arguments.partial, drop_failed=arguments.drop_failed),
                arguments.shard_bytes,
                arguments.range_rows,
            )
            publish(job, arguments.dir, DATASET)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error)
    made = f"{done.num_rows:,} rows in {len(done.files)} files: {done.path}"
    print(renamed(made, job, arguments.dir))
    return 0


def _parser() -> argparse.ArgumentParser:
    usual = Sharding()
    parser = argparse.ArgumentParser(
        "pipeline.finalize", description="Writes DIR/dataset from the parts, in the order of the input."
    )
    parser.add_argument("dir", help="the job's output.dir")
    parser.add_argument(
        "--format",
        choices=[form.value for form in DatasetFormat],
        help=f"arrow: for datasets.load_from_disk; parquet: under dataset/parquet ({usual.form.value})",
    )
    parser.add_argument(
        "--shard-bytes", type=int, metavar="N", help=f"end a file beyond this size ({usual.shard_bytes})"
    )
    parser.add_argument(
        "--range-rows",
        type=int,
        metavar="N",
        help=f"begin a new file about every so many rows, the grain of --rolling ({usual.range_rows})",
    )
    parser.add_argument("--partial", action="store_true", help="take what is there of an unfinished job")
    parser.add_argument("--drop-failed", action="store_true", help="leave out rows in error or skipped")
    parser.add_argument(
        "--rolling",
        action="store_true",
        help="publish finished ranges while the job runs, then, once it is complete, write the dataset; "
        "errors in a published range are no longer retried",
    )
    parser.add_argument(
        "--delete-parts", action="store_true", help="with --rolling: delete parts whose rows are published"
    )
    parser.add_argument(
        "--once", action="store_true", help="with --rolling: publish what is finished now, do not wait"
    )
    parser.add_argument(
        "--poll-s", type=float, default=30.0, metavar="S", help="with --rolling: look so often (30)"
    )
    return parser


def _require_fitting(arguments: argparse.Namespace) -> None:
    """Raises ValueError for options that contradict each other."""
    for option in ("delete_parts", "once"):
        if getattr(arguments, option) and not arguments.rolling:
            raise ValueError(f"--{option.replace('_', '-')} goes with --rolling: add that")
    for option in ("partial", "drop_failed"):
        if getattr(arguments, option) and arguments.rolling:
            raise ValueError(
                f"--rolling publishes every row of what is finished: use --{option.replace('_', '-')} "
                "without it, in a finalize of its own"
            )
    if arguments.rolling and is_remote(arguments.dir):
        raise ValueError(f"--rolling needs a local output.dir, {arguments.dir} is none: leave it out")


def _publish(arguments: argparse.Namespace) -> bool:
    """Publishes until the job is complete, or once; whether it is complete."""
    directory = JobDirectory.load(arguments.dir)
    form = None if arguments.format is None else DatasetFormat(arguments.format)
    published = Published.read(directory.store, directory.path)
    sharding = chosen_sharding(published, form, arguments.shard_bytes, arguments.range_rows)
    publisher = Publisher(directory, sharding)
    while True:
        # asked first: what is finished by then is published before the dataset is made
        complete = publisher.is_complete()
        for found in publisher.publish():
            units = found.units
            print(f"published units {units.first} to {units.last}: {found.num_rows:,} rows", flush=True)
        if arguments.delete_parts:
            for name in publisher.delete_parts():
                print(f"deleted part {name}", flush=True)
        if complete or arguments.once:
            return complete
        time.sleep(arguments.poll_s)


if __name__ == "__main__":
    sys.exit(main())
