"""Publishing finished ranges while the job runs, and deleting parts that nobody needs any more.

Knows: the order of the steps. A range's units are sealed first, by a lease that nobody follows: whatever any
worker writes for them afterwards is void. Then its shards are written, then a record says so, and only what
that record stands for may be deleted. Each step can be the last one of a process; another goes on, also
beside it. Refuses to know: how rows are found and shards written (`output/`), how long to wait.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from pipeline import durable
from pipeline.cluster.leases import LeaseTaker
from pipeline.cluster.spent_parts import delete_spent_parts, is_over
from pipeline.cluster.workers import WorkerRecord, read_record
from pipeline.output.chains import Leases
from pipeline.output.dataset import Sharding
from pipeline.output.finalize import Selection, dataset_schema, schema_identity, unit_tables
from pipeline.output.integrity import part_problems
from pipeline.output.layout import PUBLISHED, PUBLISHED_HOLDER
from pipeline.output.ledger import CommitRef, JournalScan, Ledger
from pipeline.output.progress import JobDirectory
from pipeline.output.published import Published, PublishedRange, range_path, settle_sharding
from pipeline.output.ranges import UnitRange, unit_ranges
from pipeline.output.shards import ARROW, PARQUET, Shard, ShardWriter, rebatch
from pipeline.output.stored import StoredRows
from pipeline.output.tally import Tally, tallies

# All rows go in: what is published can be all that is left of them.
_EVERYTHING = Selection()
# How the names of shards begin that are not whole yet.
_UNFINISHED = ".new."


class Publisher:
    """Publishes a job's ranges, as far as they are finished at each call. Any number may be at work."""

    def __init__(self, directory: JobDirectory, sharding: Sharding) -> None:
        """Raises ValueError if others published the job cut otherwise, FullDisk, OSError."""
        self._directory = directory
        self._sharding = sharding
        self._store, self._job = directory.store, directory.path
        self._leases = Leases(self._store, self._job)
        self._taker = LeaseTaker(self._store, self._job, self._leases, PUBLISHED_HOLDER)
        self._scan = JournalScan(self._store, self._job)
        self._schema = dataset_schema(directory, _EVERYTHING)
        self._sizes = np.diff(directory.units.starts()) * directory.samples
        # the last one may become longer if files are added to the input
        self.ranges = unit_ranges(directory.units, directory.samples, sharding.range_rows)[:-1]
        # parts that were found whole, and up to which byte
        self._checked: dict[str, int] = {}
        with durable.full_disk_named(self._job):
            settle_sharding(self._store, self._job, sharding)
            # from one that died, or is at work: that one finds out, and ends
            for path in (self._job / PUBLISHED).glob(f"{_UNFINISHED}*"):
                durable.remove(path)

    def publish(self) -> Iterator[PublishedRange]:
        """Publishes each range that is finished and was not yet, and gives what its record says.

        Raises ValueError for damaged files, or if another process began to publish; FullDisk, OSError.
        """
        published = Published.read(self._store, self._job)
        waiting = [units for units in self.ranges if units not in published.ranges]
        ledger, fences = self._look()
        digest = self._directory.plan.digest
        foreign = [part.header.part for part in ledger.parts if part.header.fingerprint != digest]
        self._require_whole(foreign, ledger)
        rows, errors = ledger.sums(max(len(self._sizes), ledger.num_units))
        full = rows[: len(self._sizes)] == self._sizes
        records: dict[str, WorkerRecord | None] = {}
        sealed = [
            units
            for units in waiting
            if full[units.first : units.last + 1].all()
            and not self._is_being_mended(units, fences, errors, records)
            and self._seal(units, fences)
        ]
        if not sealed:
            return
        # with the cuts of the new leases: from now on nothing changes for these units
        ledger, _ = self._look()
        stored = StoredRows(ledger, self._directory.order, self._directory.samples, published.sharded())
        for units in sealed:
            try:
                with durable.full_disk_named(self._job):
                    found = self._write(units, stored)
            except ValueError:
                # another process may have published it, and deleted what this one was reading
                if not self._store.exists(range_path(self._job, units)):
                    raise
                continue
            yield found

    def is_complete(self) -> bool:
        """Whether all results of the job are there."""
        ledger, _ = self._look()
        return ledger.num_results >= self._directory.num_results

    # ---------------------------------------------------------------- sealing

    def _look(self) -> tuple[Ledger, np.ndarray]:
        self._scan.refresh()
        # after the journals: see Ledger.of
        return Ledger.of(self._scan, self._leases), self._leases.fences(len(self._sizes))

    def _is_being_mended(
        self,
        units: UnitRange,
        fences: np.ndarray,
        errors: np.ndarray,
        records: dict[str, WorkerRecord | None],
    ) -> bool:
        """Whether a worker is at errors of the range: it would work in vain."""
        for unit in (np.flatnonzero(errors[units.first : units.last + 1]) + units.first).tolist():
            holder = self._leases.lease(unit, int(fences[unit])).incarnation
            if holder is None or holder == PUBLISHED_HOLDER:
                continue
            if holder not in records:
                records[holder] = read_record(self._store, self._job, holder)
            record = records[holder]
            if record is not None and not is_over(record) and unit in dict(record.held):
                return True
        return False

    def _seal(self, units: UnitRange, fences: np.ndarray) -> bool:
        """Makes all rows of now the last ones of these units; False if another worker just took one over."""
        for unit in range(units.first, units.last + 1):
            chain = self._leases.chain(unit, int(fences[unit]))
            if chain.holder != PUBLISHED_HOLDER and not self._taker.take_over(chain):
                # perhaps by another process that publishes: that is seen the next time
                return False
        return True

    # ---------------------------------------------------------------- writing

    def _write(self, units: UnitRange, stored: StoredRows) -> PublishedRange:
        parts = self._parts_of(units, stored)
        self._require_whole(parts, stored.ledger)
        temporary = f"{_UNFINISHED}{secrets.token_hex(4)}.{units.first:08d}-{units.last:08d}."
        try:
            shards = self._write_shards(units, stored, temporary)
        except FileNotFoundError as error:
            raise ValueError(
                f"another process began to publish {self._job} after this one, which ends here"
            ) from error
        found = PublishedRange(
            units=units,
            start=self._directory.units[units.first].start,
            sharding=self._sharding,
            schema=schema_identity(self._schema),
            shards=shards,
            parts={name: dataclasses.asdict(tally) for name, tally in sorted(parts.items())},
        )
        durable.fsync_directory(self._job / PUBLISHED)
        # if another process was first, its record says the same
        self._store.create_new(range_path(self._job, units), found.encode())
        return found

    def _write_shards(
        self, units: UnitRange, stored: StoredRows, temporary: str
    ) -> dict[str, tuple[Shard, ...]]:
        """Writes them by passing names, then gives them those that last."""
        folder, sharding = self._job / PUBLISHED, self._sharding
        # what is left of the parts is read from Arrow, whatever the dataset is to be
        forms = [ARROW, *(form for form in sharding.form.forms if form == PARQUET)]
        writers = [ShardWriter(folder, self._schema, form, sharding.shard_bytes, temporary) for form in forms]
        tables = (
            table
            for number in range(units.first, units.last + 1)
            for table in unit_tables(self._directory, stored, _EVERYTHING, self._directory.units[number])
        )
        try:
            for batch in rebatch(tables, self._schema):
                for writer in writers:
                    writer.write(batch)
            finished = {writer.form: writer.close() for writer in writers}
        except OSError:
            for writer in writers:
                writer.abandon()
            for path in folder.glob(f"{temporary}*"):
                durable.remove(path)
            raise
        # equal names are equal bytes, whoever writes them
        lasting = f"{units.first:08d}-{units.last:08d}.{schema_identity(self._schema)[:8]}."
        return {
            form: tuple(_rename(folder, shard, temporary, lasting) for shard in shards)
            for form, shards in finished.items()
        }

    def _parts_of(self, units: UnitRange, stored: StoredRows) -> dict[str, Tally]:
        """What each part gives to the range."""
        parts: dict[str, Tally] = {}
        for number in range(units.first, units.last + 1):
            for ref, tally in tallies(stored, stored.unit(self._directory.units[number])):
                assert isinstance(ref, CommitRef), "a range that is to be published is read from parts"
                name = stored.ledger.parts[ref.part].header.part
                parts[name] = parts.get(name, Tally()) + tally
        return parts

    def _require_whole(self, names: Iterable[str], ledger: Ledger) -> None:
        """Raises ValueError if a part is of another job, or a byte of it is not as it was committed."""
        committed = {part.header.part: part.committed for part in ledger.parts}
        for name in names:
            if self._checked.get(name, 0) < committed[name]:
                for problem in part_problems(self._directory, name):
                    raise ValueError(f"{problem}; python -m pipeline.verify {self._job} tells all")
                self._checked[name] = committed[name]

    # ---------------------------------------------------------------- deleting

    def delete_parts(self) -> Iterator[str]:
        """Deletes each part whose rows are all published, if nobody writes to it; gives its name.

        Raises ValueError for damaged files, FullDisk, OSError.
        """
        with durable.full_disk_named(self._job):
            yield from delete_spent_parts(self._directory, self._scan, self._leases)


def _rename(folder: Path, shard: Shard, temporary: str, lasting: str) -> Shard:
    name = shard.name.replace(temporary, lasting)
    durable.rename(folder / shard.name, folder / name)
    return dataclasses.replace(shard, name=name)
