"""What a proof finds: problems, and what there is.

Knows: how it is counted. Refuses to know: how it is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.output.tally import Tally


@dataclass(frozen=True)
class PartFound:
    """A part, what its rows that count add up to, and how many others it holds: void ones, mended errors.

    size: its committed bytes.
    """

    name: str
    incarnation: str
    worker: str
    size: int
    counted: Tally
    num_void: int


@dataclass
class Verdict:
    """What was found. `problems` keeps the first ones; `num_problems` counts all.

    total: of the results that count. parts: in the order of their names.
    """

    total: Tally = Tally()  # noqa: RUF009
    parts: list[PartFound] = field(default_factory=list)
    has_dataset: bool = False
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)
    max_kept: int = 50

    @property
    def complete(self) -> bool:
        return self.num_problems == 0

    @property
    def num_results(self) -> int:
        return self.total.rows

    @property
    def num_errors(self) -> int:
        return self.total.errors

    @property
    def num_skipped(self) -> int:
        return self.total.skipped

    @property
    def num_void(self) -> int:
        """Committed rows that do not count."""
        return sum(part.num_void for part in self.parts)

    def add(self, problem: str) -> None:
        self.num_problems += 1
        if len(self.problems) < self.max_kept:
            self.problems.append(problem)
