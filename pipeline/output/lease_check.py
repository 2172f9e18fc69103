"""Whether the leases of a job are whole, and every commit is of somebody who once held its unit.

Knows: chains and who committed. Refuses to know: rows. That a commit came too late to count is no fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby

from pipeline.output.chains import Leases
from pipeline.output.layout import LEASES, UNITS_PER_FOLDER, lease_path
from pipeline.output.ledger import Ledger
from pipeline.output.progress import JobDirectory


def lease_problems(directory: JobDirectory) -> Iterator[str]:
    """What is wrong with single leases, a line each that names the file. Reads each once."""
    store, folder = directory.store, directory.path / LEASES
    for name in sorted(store.names(folder)):
        leases = Leases(store, directory.path)
        for unit, fences in sorted(_by_unit(store.names(folder / name)).items()):
            for fence in range(max(fences) + 1):
                try:
                    leases.lease(unit, fence)
                except (ValueError, OSError) as error:
                    yield str(error)


def _by_unit(names: list[str]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for name in names:
        unit, _, fence = name.partition(".")
        # other names are told by whoever lists fences
        if unit.isdigit() and fence.isdigit():
            found[int(unit)].append(int(fence))
    return found


def holder_problems(directory: JobDirectory, ledger: Ledger) -> Iterator[str]:
    """Commits of incarnations that never held the unit, a line for each unit and part."""
    pairs = ledger.touching().tolist()
    leases = Leases(directory.store, directory.path)
    fences = leases.fences(ledger.num_units)
    for folder, of_folder in groupby(pairs, key=lambda pair: pair[0] // UNITS_PER_FOLDER):
        # leases of a folder at a time: there may be a hundred thousand
        leases = Leases(directory.store, directory.path)
        for unit, of_unit in groupby(of_folder, key=lambda pair: pair[0]):
            assert unit // UNITS_PER_FOLDER == folder
            parts = [ledger.parts[part].header for _, part in of_unit]
            if fences[unit] < 0:
                yield f"lease {lease_path(directory.path, unit, 0)} is missing: restore the file"
                continue
            try:
                holders = leases.chain(unit, int(fences[unit])).incarnations
            except (ValueError, OSError):
                # told by `lease_problems`
                continue
            for header in parts:
                if header.incarnation not in holders:
                    yield (
                        f"part {header.part} holds rows of unit {unit}, which {header.incarnation} never "
                        f"held ({lease_path(directory.path, unit, 0).with_suffix('')}.*)"
                    )
