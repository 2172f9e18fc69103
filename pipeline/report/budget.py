"""Whether a job has spent what it may: cost.max_usd over the time this process has held its GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipeline.config import CostConfig
from pipeline.report.cost import dollars, is_over_budget, money


class Budget:
    """started: when the process began to cost money, as `clock` tells time."""

    def __init__(self, cost: CostConfig, started: float, clock: Callable[[], float] = time.time) -> None:
        self._cost = cost
        self._started = started
        self._clock = clock

    @property
    def spent(self) -> bool:
        return is_over_budget(
            dollars(self._clock() - self._started, self._cost.gpu_hour_usd), self._cost.max_usd
        )

    @property
    def reason(self) -> str | None:
        """For the summary; None while there is money left."""
        if not self.spent or self._cost.max_usd is None:
            return None
        return f"cost.max_usd={money(self._cost.max_usd)} is spent: raise it and give the same command again"
