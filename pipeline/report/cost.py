"""What a job costs, from time and tokens alone. Pure arithmetic."""

from __future__ import annotations

import math


def dollars(seconds: float, gpu_hour_usd: float, num_gpus: int = 1) -> float:
    """The price of `seconds` on `num_gpus` GPUs at once."""
    return seconds / 3600 * gpu_hour_usd * num_gpus


def dollars_per_million(spent_usd: float, num_tokens: int) -> float | None:
    """Dollars per million tokens; None before the first token."""
    return spent_usd / num_tokens * 1e6 if num_tokens else None


def projected(so_far: float, done: int, total: int) -> float | None:
    """What the whole will take (dollars or seconds) if the rest goes like `so_far` for `done` rows of
    `total`; None while nothing is done."""
    return so_far / done * total if done else None


def is_over_budget(spent_usd: float, max_usd: float | None) -> bool:
    return max_usd is not None and spent_usd >= max_usd


def money(usd: float) -> str:
    """As people read it: cents, and two significant digits below ten cents."""
    decimals = 2 if usd <= 0 else max(2, 1 - math.floor(math.log10(usd)))
    return f"${usd:,.{decimals}f}"
