"""How long a job took until its first step could begin, by stage. Knows a clock and names of stages."""

from __future__ import annotations

import time


class StartUp:
    """Times stages that follow each other, the first from when this was made."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._stages: dict[str, float] = {}

    def finished(self, stage: str) -> None:
        """The stage that began where the last one ended is over."""
        now = time.monotonic()
        self._stages[stage] = now - self._since
        self._since = now

    def text(self) -> str:
        """In seconds: `11.3 s (imports 6.1, preparation 0.8, model 3.2, engine 1.2)`."""
        stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in self._stages.items())
        return f"{sum(self._stages.values()):.1f} s ({stages})"
