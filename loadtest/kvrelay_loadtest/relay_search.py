"""Which request rate a system can still serve well: a few runs, each at the rate that the ones before suggest.

    start ─ met ─▶ × 1.6 ─ met ─▶ × 1.6 …          a rate is *met* if 90 % of its requests meet every objective
      └─ missed ─▶ ÷ 1.6 …
    met and missed, more than a quarter apart ─▶ their geometric mean

The system's *goodput rate* is the highest rate that was met.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

STEP = 1.6
CLOSE = 1.25
SHARE = 0.9
LOWEST, HIGHEST = 0.02, 200.0


def next_rate(tried: Mapping[float, bool], start: float, tries: int) -> float | None:
    """`tried`: rate → met. None: enough is known, or `tries` runs are done."""
    if len(tried) >= tries:
        return None
    if not tried:
        return start
    met, missed = goodput_rate(tried), min((rate for rate, good in tried.items() if not good), default=0.0)
    if not missed:
        return met * STEP if met * STEP <= HIGHEST else None
    if not met:
        return missed / STEP if missed / STEP >= LOWEST else None
    return math.sqrt(met * missed) if missed / met > CLOSE else None


def goodput_rate(tried: Mapping[float, bool]) -> float:
    """0 if none was met."""
    return max((rate for rate, good in tried.items() if good), default=0.0)
