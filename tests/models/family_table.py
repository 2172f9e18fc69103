"""The README's table of families, made of what the runs found: python tests/models/family_table.py [--write]

Knows how to say it; refuses to know what must come out (`test_families.py` does).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from models.families import REFUSED, RUN, Family  # noqa: E402
from models.family_runs import FamilyRun, original_range, refusal_of, run_family  # noqa: E402

README = ROOT / "README.md"
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"


def family_table() -> str:
    """Markdown: a line for every family, those that run first."""
    lines = ["| family | result |", "| --- | --- |"]
    lines += [f"| {one.name} | {_found(one, run_family(one.name))} |" for one in RUN]
    lines += [f"| {one.name} | {_shortened(refusal_of(one.name))} |" for one in REFUSED]
    return "\n".join(lines)


def written_table(text: str) -> str:
    """What stands between the markers."""
    return text.split(BEGIN)[1].split(END)[0].strip("\n")


def _found(chosen: Family, run: FamilyRun) -> str:
    reference = run.reference
    different = [mode.value for mode, rows in run.got.items() if rows != reference.expected]
    if different:
        return f"differs from generate ({', '.join(different)})"
    fired = {
        "chunked": all(c.num_partial_prefill_chunks for c in run.counters.values()),
        "shared": all(c.num_shared_blocks for c in run.counters.values()),
        "preempted": all(c.num_preemptions for c in run.counters.values()),
    }
    longest, original = max(reference.lengths), original_range(chosen.config())
    forced = [", ".join(name for name, fires in fired.items() if fires)]
    forced += [f"past the window of {window}" for window in sorted(run.windows) if longest > window]
    if original is not None and longest > original:
        forced.append(f"past the original {original} positions")
    return f"equals generate: {'; '.join([*forced, ', '.join(mode.value for mode in run.got)])}"


def _shortened(refusal: str) -> str:
    """The reason alone: no key, no numbers of this run, no way out."""
    said = re.sub(r" \(.*\)", "", refusal.removeprefix("model.path: "))
    return f"refused: {re.split('[;:]|[.] ', said)[0]}" if said else "not refused"


def _write() -> None:
    text = README.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n{family_table()}\n{END}{after}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        _write()
    else:
        print(family_table())
