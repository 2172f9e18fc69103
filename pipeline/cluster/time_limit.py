"""How long this process may still run, as the cluster or the user said.

Knows: one moment, and what can still be done before it. Refuses to know: what a unit is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

# Before the limit, to commit and to leave: some file systems take their time.
_LEAVING_S = 30.0


class TimeLimit:
    """end: the limit, as `clock` tells time; None for none."""

    def __init__(self, end: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._end = None if end is None else end - _LEAVING_S
        self._clock = clock
        self.was_felt = False

    @classmethod
    def of(cls, limit_s: float | None, ran_s: float, environment: Mapping[str, str]) -> TimeLimit:
        """limit_s: cluster.time_limit_s, of which ran_s are gone. Else what Slurm says, if it does."""
        now = time.monotonic()
        if limit_s is not None:
            return cls(now + limit_s - ran_s)
        end = environment.get("SLURM_JOB_END_TIME")
        return cls(now + float(end) - time.time() if end and end.isdigit() else None)

    @property
    def is_over(self) -> bool:
        return not self.allows(None)

    def allows(self, seconds: float | None) -> bool:
        """Whether something that takes so long can still be finished; None: nobody knows how long."""
        allowed = self._end is None or self._clock() + (seconds or 0.0) < self._end
        self.was_felt = self.was_felt or not allowed
        return allowed

    @property
    def reason(self) -> str | None:
        """For the summary; None unless the limit has kept something from being done."""
        return "the time limit: give the same command again to go on" if self.was_felt else None
