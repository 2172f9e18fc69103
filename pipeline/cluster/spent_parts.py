"""Deleting parts that nobody needs: all rows of them that count are published.

Knows: when a part is no longer written to, and what must be on disk before it goes. Its journal stays, by
which everybody counts. Refuses to know: how ranges are published.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline import durable
from pipeline.cluster.processes import Process
from pipeline.cluster.workers import WorkerRecord, read_record
from pipeline.output.chains import Leases
from pipeline.output.integrity import sha256_of
from pipeline.output.layout import incarnations, part_path
from pipeline.output.ledger import JournalScan, Ledger, Part
from pipeline.output.progress import JobDirectory
from pipeline.output.published import DeletedPart, Published, deleted_path


def delete_spent_parts(directory: JobDirectory, scan: JournalScan, leases: Leases) -> Iterator[str]:
    """Deletes each part that is spent and left by its owner; gives its name. It can end at any point.

    Raises ValueError for damaged files, OSError.
    """
    store, job = directory.store, directory.path
    # before the journals: what a worker commits at its very end must not be missed
    over = _incarnations_over(directory)
    scan.refresh()
    ledger = Ledger.of(scan, leases)
    published = Published.read(store, job)
    pairs = ledger.counting()
    needed = set(pairs[~published.mask(ledger.num_units)[pairs[:, 0]], 1].tolist())
    latest: dict[str, int] = {}
    for part in ledger.parts:
        latest[part.header.incarnation] = max(part.seq, latest.get(part.header.incarnation, 0))
    for number, part in enumerate(ledger.parts):
        name, owner = part.header.part, part.header.incarnation
        if number in needed or not store.exists(part_path(job, name)):
            continue
        if name not in published.deleted:
            # a worker that only seems dead may come back and write to its last part
            if part.closed is None and part.seq == latest[owner] and owner not in over:
                continue
            gone = _deleted_part(directory, part, pairs[pairs[:, 1] == number, 0], published)
            store.create_new(deleted_path(job, name), gone.encode())
        durable.remove(part_path(job, name))
        yield name


def _deleted_part(
    directory: JobDirectory, part: Part, units: np.ndarray, published: Published
) -> DeletedPart:
    """units int64: those of which the part holds rows that count."""
    name = part.header.part
    ranges = tuple(one for one in published.ranges if np.any((units >= one.first) & (units <= one.last)))
    hashed = sha256_of(directory.store, part_path(directory.path, name), part.committed)
    return DeletedPart(name, part.committed, hashed, ranges)


def _incarnations_over(directory: JobDirectory) -> set[str]:
    """Those who will never write again, as they said or as can be seen."""
    names = incarnations(directory.path, directory.store)
    records = {name: read_record(directory.store, directory.path, name) for name in names}
    return {name for name, record in records.items() if record is not None and is_over(record)}


def is_over(record: WorkerRecord) -> bool:
    """Whether a worker is known to be gone: that it is silent says nothing."""
    return record.ended is not None or record.process.is_known_gone_to(Process.current())
