"""What must be true of a simulated job once all is over. Raises AssertionError.

Knows: the job's files, and what workers were told is durable. Refuses to know: how they came about.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from cluster.simulated_job import Shape, job_of
from fake_jobs import complete

from pipeline.output import journal
from pipeline.output.chains import Lease, Leases
from pipeline.output.journal import Commit
from pipeline.output.layout import journal_path, lease_path, part_path
from pipeline.output.ledger import Ledger
from pipeline.output.stored import StoredRows

if TYPE_CHECKING:
    from cluster.simulator import Simulation


def audit(simulation: Simulation) -> None:
    _require_what_was_durable(simulation)
    _require_exactly_once(simulation)


def untouched_and_lacking(simulation: Simulation) -> list[int]:
    """The units that lack rows at this moment and that nobody has taken over."""
    directory, store = simulation.directory, simulation.directory.store
    sizes = np.diff(directory.units.starts()) * directory.samples
    rows, _ = Ledger.read(simulation.job, store).sums(len(sizes))
    fences = Leases(store, simulation.job).fences(len(sizes))
    units: list[int] = np.flatnonzero((rows != sizes) & (fences < 1)).tolist()
    return units


def _require_what_was_durable(simulation: Simulation) -> None:
    """Leases that somebody was told to have, rows of which somebody was told that they are safe."""
    store, job = simulation.directory.store, simulation.job
    for (unit, fence), lease in simulation.leases.items():
        path = lease_path(job, unit, fence)
        assert store.exists(path), f"{lease} is gone"
        assert Lease.decode(store.read(path)) == lease, f"{path} is not {lease}"
    lines: dict[str, set[Any]] = {}
    for name, commit in simulation.commits:
        if name not in lines:
            lines[name] = set(journal.read(journal_path(job, name), store))
        assert commit in lines[name], f"commit {commit.seq} of {name} is gone"
    for name, entries in lines.items():
        data, begin = store.read(part_path(job, name)), 0
        for entry in sorted(entries, key=lambda entry: entry.offset):
            if isinstance(entry, Commit):
                found = hashlib.sha256(data[begin : entry.offset]).hexdigest()
                assert found == entry.sha256, f"commit {entry.seq} of {name} has other bytes"
            begin = entry.offset


def _require_exactly_once(simulation: Simulation) -> None:
    directory, store = simulation.directory, simulation.directory.store
    ledger = Ledger.read(simulation.job, store)
    sizes = np.diff(directory.units.starts()) * directory.samples
    rows, errors = ledger.sums(len(sizes))
    assert rows.tolist() == sizes.tolist(), f"rows by unit {rows.tolist()}, wanted {sizes.tolist()}"
    assert not errors.any(), "errors were left over"
    leases = Leases(store, simulation.job)
    fences = leases.fences(len(sizes))
    assert (fences >= 0).all(), "a unit has no lease"
    for unit, fence in enumerate(fences.tolist()):
        # each fence is there
        leases.chain(unit, fence)
    stored = StoredRows(ledger, directory.order, directory.samples)
    for unit in directory.units:
        found = stored.unit(unit)
        assert not len(found.doubled()), f"unit {unit.number} has rows twice"
        assert found.done(count_errors=False).all(), f"unit {unit.number} lacks rows"
        table = stored.take(found, found.ordered())
        held = list(zip(*(table.column(name).to_pylist() for name in _COLUMNS), strict=True))
        begin, end = unit.start * directory.samples, unit.stop * directory.samples
        assert held == _wanted(simulation.shape)[begin:end], f"unit {unit.number} has other values"
    simulation.counts["void commits"] += sum(
        not ledger.counts(ref, unit) for ref in ledger.all_commits() for unit in ledger.units_of(ref)
    )
    simulation.counts["takeovers"] += int(fences.sum())
    simulation.counts["rows made"] += simulation.made.total()
    simulation.counts["rows wanted"] += int(sizes.sum())


_COLUMNS = ("file", "row", "sample", "completion", "finish_reason")


@lru_cache
def _wanted(shape: Shape) -> list[tuple[Any, ...]]:
    """What the job is to hold, in the order of its slots."""
    directory, rows = job_of(shape)
    wanted = []
    for row in rows:
        for sample in range(directory.samples):
            made = complete(row, sample)
            wanted.append((row.key.file, row.key.row, sample, made.text, made.finish_reason.value))
    return wanted
